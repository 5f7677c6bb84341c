"""Launches that wait for another result, as calls of a chain do.

`mx.depends` does not do that: it orders what the host submits, but hands the array itself on, and
a GPU waits for the buffers of arguments only. Launches behind it run side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from turbospark.kernels.gpu.kernel import GpuTarget

_NAME = "chain_link"


class Links:
    """A target whose launches can be given one argument more, which no body reads.

    That makes them wait for it, takes no launch of its own, and leaves the bodies as they are.

    Args:
        target: where.

    Attributes:
        target: the same with links.
    """

    def __init__(self, target: GpuTarget) -> None:
        self._builder = target.builder
        self.target = replace(target, builder=self._build)
        self._link: mx.array | None = None

    def behind(self, link: mx.array, step: Callable[[], mx.array]) -> mx.array:
        """What `step` gives if all that it launches waits for `link`."""
        self._link = link
        try:
            return step()
        finally:
            self._link = None

    def _build(self, **names: Any) -> Callable[..., Sequence[mx.array]]:
        plain = self._builder(**names)
        # On CUDA a built kernel is found by its name and template alone.
        own = {"name": f"{names['name']}_linked", "input_names": [*names["input_names"], _NAME]}
        linked = self._builder(**(names | own))

        def launch(**call: Any) -> Sequence[mx.array]:
            if self._link is None:
                return plain(**call)
            more = {
                "inputs": [*call["inputs"], self._link],
                "template": [*call["template"], (f"TYPE_{_NAME}", self._link.dtype)],
            }
            return linked(**(call | more))

        return launch

"""Inputs at chosen addresses in emulation, which else has each at a multiple of 16 bytes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from turbospark.kernels.gpu.kernel import GpuTarget


def placed(target: GpuTarget, names: Collection[str], before: int) -> GpuTarget:
    """A target whose inputs of these names begin `before` numbers behind a multiple of 32 bytes."""

    def whole(array: mx.array) -> mx.array:
        behind = -(before + array.size) % (32 // array.dtype.size)
        return mx.pad(mx.reshape(array, (-1,)), (before, behind))

    def build(**given: Any) -> Callable[..., Sequence[mx.array]]:
        moves = {name: name in names for name in given["input_names"]}
        opening = "".join(
            f"auto const {name} = {name}_whole + {before};\n" for name in moves if moves[name]
        )
        given["input_names"] = [f"{name}_whole" if moves[name] else name for name in moves]
        given["source"] = opening + given["source"]
        kernel = target.builder(**given)

        def launch(**call: Any) -> Sequence[mx.array]:
            pairs = zip(call["inputs"], moves.values(), strict=True)
            call["inputs"] = [whole(array) if is_moved else array for array, is_moved in pairs]
            return kernel(**call)

        return launch

    return replace(target, builder=build)

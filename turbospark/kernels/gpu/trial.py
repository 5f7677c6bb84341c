"""Whether a body runs here: a GPU compiles and refuses only when results are asked for."""

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx

from turbospark.errors import KernelError
from turbospark.kernels.gpu.kernel import GpuTarget

_log = logging.getLogger("turbospark")


def runs(
    body: str,
    sizes: str,
    launch: Callable[[], mx.array | Sequence[mx.array]],
    target: GpuTarget,
    *,
    instead: str = "MLX operations do",
) -> bool:
    """Launch a body on zeros; one line in the log says so where it cannot run.

    Args:
        body: its name.
        sizes: for which it is tried, in words.
        launch: builds the launch.
        target: where; an emulation is not asked.
        instead: what runs where it does not, in words.
    """
    if target.name not in ("metal", "cuda"):
        return True
    try:
        mx.eval(launch())  # pyright: ignore[reportUnknownMemberType]
    except (KernelError, RuntimeError, ValueError) as error:
        _log.warning("turbospark: %s cannot run for %s, %s: %s", body, sizes, instead, error)
        return False
    return True

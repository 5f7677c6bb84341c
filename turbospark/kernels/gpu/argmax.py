"""The likeliest token of each row of logits, in two short launches.

A reduction of one row in one threadgroup takes longer than reading the row by all of a GPU.
"""

import functools

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu import trial
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel

PARTS = Kernel("argmax_parts", ("logits",), ("tops", "places"))
JOIN = Kernel("argmax_join", ("tops", "places"), ("tokens",))
NOT_FINITE = -1

_THREADS, _SPAN = 256, 1024


def argmax_rows(logits: mx.array, *, target: GpuTarget) -> mx.array:
    """Where each row's largest value stands, the first of several.

    Args:
        logits: [M, V] float32, V at least 8.
        target: where.

    Returns:
        [M] int32; NOT_FINITE for a row that holds NaN or infinity.

    Raises:
        ShapeError: `logits` is no such array.
    """
    if logits.ndim != 2 or 0 in logits.shape or logits.shape[1] < 8 or logits.dtype != mx.float32:
        raise ShapeError(f"argmax_rows takes float32 rows, not {logits.dtype} {logits.shape}")
    M, V = logits.shape
    parts = -(-V // _SPAN)
    made = PARTS(
        target,
        [logits],
        template={"V": V, "SPAN": _SPAN, "PARTS": parts, "THREADS": _THREADS},
        grid=(parts * _THREADS, M, 1),
        threadgroup=(_THREADS, 1, 1),
        outputs=[((M, parts), mx.int32)] * 2,
    )
    (tokens,) = JOIN(
        target,
        made,
        template={"V": V, "PARTS": parts},
        grid=(32, M, 1),
        threadgroup=(32, 1, 1),
        outputs=[((M,), mx.int32)],
    )
    return tokens


@functools.cache
def serves(V: int, target: GpuTarget) -> bool:
    """Whether rows of V logits can be taken: tried once, on zeros."""
    return trial.runs(
        "argmax_parts",
        f"{V} logits",
        lambda: argmax_rows(mx.zeros((1, V), mx.float32), target=target),
        target,
        instead="MLX's argmax does",
    )

"""The end of a layer whose experts' sum and shared expert have norms of their own, on a GPU."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.experts import launch
from turbospark.kernels.gpu.kernel import GpuTarget, constant
from turbospark.kernels.weights import Norm


def experts_close(
    h: mx.array,
    sums: mx.array,
    norms: tuple[Norm, Norm, Norm],
    factor: mx.array,
    *,
    target: GpuTarget,
    bundle: Bundle | None = None,
) -> mx.array:
    """(h + norm(norm_a(a) + norm_b(b))) * factor, in one launch.

    Args:
        h: [M, C], C a multiple of 8.
        sums: [M, 2, C] float32, every row's a and b.
        norms: of a, of b, of their sum; each has a weight.
        factor: [1] float32, in the GPU's own memory.
        target: where.
        bundle: where what never changes lies side by side, if it does.

    Returns:
        [M, C] like h.

    Raises:
        ShapeError: the arrays do not belong together.
    """
    M, C = h.shape
    weights = [norm.weight for norm in norms if norm.weight is not None]
    if C % 8 or sums.shape != (M, 2, C) or [w.shape for w in weights] != [(C,)] * 3:
        raise ShapeError(f"experts_close of h {h.shape} takes no sums {sums.shape}")
    threads = 32 * min(8, -(-C // 256))
    (y,) = launch(
        target,
        "experts_close",
        {
            "h": h,
            "sums": sums,
            **dict(zip(("a_weight", "b_weight", "weight"), weights, strict=True)),
            "numbers": closing_numbers(norms),
            "factor": factor,
        },
        {"y": ((M, C), h.dtype)},
        template={"T": h.dtype, "C": C, "THREADS": threads, "PARTS": -(-C // (8 * threads))},
        grid=(M * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        bundle=bundle,
    )
    return y


def closing_numbers(norms: tuple[Norm, Norm, Norm]) -> mx.array:
    """What `experts_close` adds to the mean squares."""
    return constant(tuple(norm.eps for norm in norms))

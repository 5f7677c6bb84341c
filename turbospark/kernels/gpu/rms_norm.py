"""RMS normalisation of rows on a GPU; its reference is kernels/rms_norm.py."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant, current_target
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import Norm

KERNEL = Kernel("rms_norm", ("x", "weight", "eps"), ("y",))

_VALUES_A_THREAD = 4


def rms_norm(x: mx.array, norm: Norm, *, target: GpuTarget | None = None) -> mx.array:
    """Normalise along the last axis: x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    Args:
        x: [..., C], at least one row.
        norm: weight [C] or None, and eps.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.

    Returns:
        Like `x`.

    Raises:
        ShapeError: `x` has no rows, or the weight has another width.
    """
    if x.ndim == 0 or x.size == 0:
        raise ShapeError(f"rms_norm takes rows, not x {x.shape}")
    C, weight = x.shape[-1], norm.weight
    if weight is not None and weight.shape != (C,):
        raise ShapeError(f"rms_norm of x {x.shape} takes a weight {(C,)}, not {weight.shape}")
    target = target or current_target()
    if target is None:
        return rms_norm_reference(x, norm).astype(x.dtype)
    simdgroups = min(8, -(-C // (32 * _VALUES_A_THREAD)))
    threads = 32 * simdgroups
    (y,) = KERNEL(
        target,
        [x, x if weight is None else weight, constant(norm.eps)],
        template={"T": x.dtype, "D": C, "THREADS": threads, "HAS_WEIGHT": weight is not None},
        grid=(x.size // C * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=[(x.shape, x.dtype)],
    )
    return y

"""RMS normalisation of rows."""

import mlx.core as mx

from turbospark.kernels.quantized_matmul import compute_dtype
from turbospark.kernels.weights import Norm


def rms_norm_reference(x: mx.array, norm: Norm | None) -> mx.array:
    """Normalise along the last axis, in float32: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., C].
        norm: the weight and eps, or None to hand `x` on as it is.

    Returns:
        [..., C]: float32 on a CPU, the dtype of `x` on a GPU.
    """
    dtype = compute_dtype(x)
    if norm is None:
        return x.astype(dtype)
    weight = None if norm.weight is None else norm.weight.astype(mx.float32)
    return mx.fast.rms_norm(x.astype(mx.float32), weight, norm.eps).astype(dtype)

"""Hyper-connections: several residual streams, of which a block reads a mixture and writes shares.

Source: transformers 5.24, models/qwen4_exp (arXiv 2409.19606, with a mixture of low rank).
"""

import mlx.core as mx

from turbospark.kernels.quantized_matmul import compute_dtype
from turbospark.kernels.weights import Norm


def grouped_norm_reference(x: mx.array, norm: Norm, groups: int) -> mx.array:
    """Normalise every stream by itself: x [T, G * C], a weight of all streams.

    Returns:
        [T, G * C]: float32 on a CPU, the dtype of `x` on a GPU.
    """
    dtype = compute_dtype(x)
    parts = mx.reshape(x.astype(mx.float32), (x.shape[0], groups, -1))
    normed = mx.reshape(mx.fast.rms_norm(parts, None, norm.eps), x.shape)
    assert norm.weight is not None
    return (normed * norm.weight.astype(mx.float32)).astype(dtype)


def mix_streams_reference(normed: mx.array, up: mx.array, groups: int) -> mx.array:
    """What a block reads: the mean of the streams, each number times its own share.

    Args:
        normed: [T, G * C].
        up: [T, G * C], the shares before the sigmoid.
        groups: G.

    Returns:
        [T, C] in the dtype of `normed`.
    """
    shares = mx.sigmoid(up.astype(mx.float32)) * normed.astype(mx.float32)
    parts = mx.reshape(shares, (normed.shape[0], groups, -1))
    total = parts[:, 0]
    for stream in range(1, groups):
        total = total + parts[:, stream]
    return (total / groups).astype(normed.dtype)


def inject_reference(h: mx.array, y: mx.array, shares: mx.array) -> mx.array:
    """Add a block's output to every stream.

    Args:
        h: [T, G * C].
        y: [T, C].
        shares: [T, G], how much of it each stream takes.

    Returns:
        [T, G * C] in the dtype of `h`.
    """
    added = shares.astype(mx.float32)[:, :, None] * y.astype(mx.float32)[:, None]
    return h + mx.reshape(added, h.shape).astype(h.dtype)

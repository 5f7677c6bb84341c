"""Weights and rows for kernel tests: drawn from a seed, odd and pairwise different sizes."""

import mlx.core as mx
import numpy as np

from turbospark.kernels.weights import QuantizedWeight


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [N, K] below 2**bits into uint32 words, low bits first."""
    planes = (codes[..., None] >> np.arange(bits)) & 1
    stream = planes.reshape(codes.shape[0], -1).astype(np.uint8)
    return np.packbits(stream, axis=1, bitorder="little").view(np.uint32)


def quantized(
    N: int,
    K: int,
    bits: int,
    group_size: int,
    *,
    zero: bool = False,
    scale_dtype: mx.Dtype = mx.float32,
    seed: int = 0,
) -> tuple[QuantizedWeight, np.ndarray]:
    """A random weight and the float64 values that it stands for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (N, K))
    scales = rng.normal(size=(N, K // group_size)) / (1 << bits)
    stored = mx.array(scales.astype(np.float32)).astype(scale_dtype)
    exact = np.array(stored.astype(mx.float32)).astype(np.float64)
    middle = 1 << (bits - 1)
    if zero:
        biases, offsets = None, -middle * exact
    else:
        drawn = rng.normal(size=exact.shape).astype(np.float32) / 2
        biases = mx.array(drawn).astype(scale_dtype)
        offsets = np.array(biases.astype(mx.float32)).astype(np.float64)
    weight = QuantizedWeight(
        mx.array(pack_codes(codes, bits)),
        stored,
        biases,
        bits,
        group_size,
        middle if zero else None,
    )
    values = codes * np.repeat(exact, group_size, 1) + np.repeat(offsets, group_size, 1)
    return weight, values


def rows(T: int, K: int, seed: int = 1) -> mx.array:
    """Random activations [T, K] float32."""
    return mx.array(np.random.default_rng(seed).normal(size=(T, K)).astype(np.float32))


def relative_error(got: mx.array, expected: np.ndarray) -> float:
    """Largest difference over the root mean square of what was expected."""
    difference = np.abs(np.array(got).astype(np.float64) - expected)
    return float(difference.max() / np.sqrt((expected**2).mean()))

"""Products with a quantized or dense matrix, in plain MLX operations: the reference."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.device import on_cpu
from turbospark.kernels.weights import QuantizedWeight, Weight

_NATIVE_GROUPS = (32, 64, 128)


def quantized_matmul_reference(x: mx.array, w: Weight, bias: mx.array | None = None) -> mx.array:
    """Multiply rows by a matrix: x @ w.T + bias.

    On a CPU everything is computed in float32 and each row's result is the same whatever rows
    stand beside it; on a GPU the result has the dtype of `x`.

    Args:
        x: [T, K].
        w: [N, K], quantized or dense.
        bias: [N], or None.

    Returns:
        [T, N].

    Raises:
        ShapeError: the inner dimensions differ.
    """
    if x.shape[-1] != w.shape[-1]:
        raise ShapeError(f"x {x.shape} cannot be multiplied by a weight {tuple(w.shape)}")
    dtype = compute_dtype(x)
    x = x.astype(dtype)
    if not isinstance(w, QuantizedWeight):
        y = x @ w.astype(dtype).T
    elif w.mode == "mxfp4":
        y = mx.quantized_matmul(
            x, w.codes, w.scales, group_size=w.group_size, bits=w.bits, mode="mxfp4"
        )
    elif _mlx_multiplies(w):
        scales = w.scales.astype(dtype)
        biases = _offsets(w).astype(dtype)
        y = mx.quantized_matmul(x, w.codes, scales, biases, group_size=w.group_size, bits=w.bits)
    else:
        y = x @ dequantize_reference(w).astype(dtype).T
    return y if bias is None else y + bias.astype(dtype)


def heads_matmul_reference(x: mx.array, w: Weight, *, transpose: bool) -> mx.array:
    """Multiply each head's rows by the head's own matrix, in float32 on a CPU.

    Args:
        x: [T, H, K], or [T, H, N] where `transpose` is false.
        w: [H, N, K], quantized or dense.
        transpose: x @ w.T, as `quantized_matmul_reference` does; else x @ w.

    Returns:
        [T, H, N], or [T, H, K] where `transpose` is false.
    """
    dtype = compute_dtype(x)
    x = x.astype(dtype).swapaxes(0, 1)  # [H, T, K]
    if isinstance(w, QuantizedWeight) and w.mode == "affine" and _mlx_multiplies(w):
        scales, biases = w.scales.astype(dtype), _offsets(w).astype(dtype)
        y = mx.quantized_matmul(
            x,
            w.codes,
            scales,
            biases,
            transpose=transpose,
            group_size=w.group_size,
            bits=w.bits,
        )
    else:
        dense = dequantize_reference(w).astype(dtype)
        y = x @ (dense.swapaxes(-1, -2) if transpose else dense)
    return y.swapaxes(0, 1)


def dequantize_reference(w: Weight) -> mx.array:
    """The float32 values [..., N, K] that a weight stands for."""
    if not isinstance(w, QuantizedWeight):
        return w.astype(mx.float32)
    if w.mode == "mxfp4":
        values = mx.dequantize(
            w.codes, w.scales, group_size=w.group_size, bits=w.bits, mode="mxfp4"
        )
        return values.astype(mx.float32)
    groups = mx.reshape(unpack_codes(w.codes, w.bits), (*w.scales.shape, w.group_size))
    scales = w.scales.astype(mx.float32)[..., None]
    values = scales * groups.astype(mx.float32) + _offsets(w)[..., None]
    return mx.reshape(values, w.shape)


def unpack_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., words] uint32, low bits first, as one uint32 a code: [..., words * 32 / bits]."""
    if 32 % bits == 0:
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        fields = (codes[..., None] >> shifts) & mx.array((1 << bits) - 1, mx.uint32)
        return mx.flatten(fields, -2, -1)
    # A width that does not divide 32 lets codes straddle words: gather each from its two words.
    count = codes.shape[-1] * 32 // bits
    first_bit = mx.arange(0, count * bits, bits, dtype=mx.uint32)
    word, shift = first_bit // 32, first_bit % 32
    last = mx.array(codes.shape[-1] - 1, mx.uint32)
    low = mx.take(codes, word, axis=-1) >> shift
    # Two shifts, because a shift by 32 is undefined where a code starts its word.
    high = (mx.take(codes, mx.minimum(word + 1, last), axis=-1) << (31 - shift)) << 1
    return (low | high) & mx.array((1 << bits) - 1, mx.uint32)


def compute_dtype(x: mx.array) -> mx.Dtype:
    """The dtype of activations: float32 on a CPU, that of `x` on a GPU."""
    return mx.float32 if on_cpu() else x.dtype


def _mlx_multiplies(w: QuantizedWeight) -> bool:
    """Whether `mx.quantized_matmul` takes this weight and gives right results for it."""
    if w.group_size not in _NATIVE_GROUPS:
        return False
    # MLX 0.32.4 on an H200: several rows times 64 columns give garbage, 128 columns do not.
    return w.shape[-1] >= 128 or on_cpu() or not mx.cuda.is_available()


def _offsets(w: QuantizedWeight) -> mx.array:
    if w.biases is not None:
        return w.biases.astype(mx.float32)
    assert w.zero is not None  # QuantizedWeight holds one of the two
    return w.scales.astype(mx.float32) * float(-w.zero)

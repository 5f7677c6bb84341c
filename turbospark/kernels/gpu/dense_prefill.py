"""Products of many rows: with the dequantized weight where that is faster."""

import mlx.core as mx

from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.quantized_matmul import quantized_matmul_reference
from turbospark.kernels.weights import QuantizedWeight, Weight

DENSE_ROWS = {"cuda": 256}
"""Rows of a prefill from which a dense product with the dequantized weight is faster."""


def wide_product(
    x: mx.array, weight: Weight, bias: mx.array | None, target: GpuTarget, *, enabled: bool
) -> mx.array:
    """Weight @ x + bias, of any number of rows x [T, K]: [T, N].

    Args:
        x: the rows.
        weight: of any kind.
        bias: [N], or None.
        target: where.
        enabled: whether a weight may be dequantized.
    """
    least = DENSE_ROWS.get(target.name)
    if (
        not enabled
        or least is None
        or x.shape[0] < least
        or not isinstance(weight, QuantizedWeight)
        or weight.mode != "affine"
        or weight.group_size not in (32, 64, 128)
    ):
        return quantized_matmul_reference(x, weight, bias)
    scales = weight.scales.astype(x.dtype)
    offsets = scales * -float(weight.zero or 0) if weight.biases is None else weight.biases
    dense = mx.dequantize(
        weight.codes,
        scales,
        offsets.astype(x.dtype),
        group_size=weight.group_size,
        bits=weight.bits,
    )
    y = x @ dense.T
    return y if bias is None else y + bias.astype(x.dtype)

"""Rows of an embedding table."""

import mlx.core as mx

from turbospark.kernels.device import on_cpu
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight, Weight


def embedding_reference(tokens: mx.array, table: Weight, scale: float = 1.0) -> mx.array:
    """Look rows up in a table [V, C] and multiply them by `scale`.

    Args:
        tokens: [T] int32 row numbers.
        table: quantized or dense.
        scale: multiplied in float32.

    Returns:
        [T, C]: float32 on a CPU, the table's float dtype on a GPU.
    """
    rows = _rows(tokens, table)
    values = dequantize_reference(rows)
    if scale != 1.0:
        values = values * scale
    return values if on_cpu() else values.astype(_float_dtype(table))


def _rows(tokens: mx.array, table: Weight) -> Weight:
    if not isinstance(table, QuantizedWeight):
        return table[tokens]
    return QuantizedWeight(
        table.codes[tokens],
        table.scales[tokens],
        None if table.biases is None else table.biases[tokens],
        bits=table.bits,
        group_size=table.group_size,
        zero=table.zero,
        mode=table.mode,
    )


def _float_dtype(table: Weight) -> mx.Dtype:
    if not isinstance(table, QuantizedWeight):
        return table.dtype
    return mx.bfloat16 if table.mode == "mxfp4" else table.scales.dtype

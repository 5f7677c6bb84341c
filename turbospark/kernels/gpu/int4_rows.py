"""Rows of a 4-bit table, looked up in one launch; its reference is kernels/embedding.py."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.embedding import embedding_reference
from turbospark.kernels.gpu.int4_product import takes
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant, current_target
from turbospark.kernels.weights import QuantizedWeight

KERNEL = Kernel("int4_rows", ("tokens", "codes", "scales", "biases", "factor"), ("y",))

_THREADS = 64


def int4_rows(
    tokens: mx.array,
    table: QuantizedWeight,
    factor: float = 1.0,
    *,
    target: GpuTarget | None = None,
) -> mx.array:
    """Look rows up in a 4-bit table and multiply them by `factor`, in float32.

    Args:
        tokens: [T] int32 row numbers, at least one.
        table: [V, C], 4 bits, groups of 32, 64 or 128.
        factor: multiplied.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.

    Returns:
        [T, C] in the dtype of the table's scales.

    Raises:
        ShapeError: `tokens` or `table` is outside these bounds.
    """
    if not takes(table):
        raise ShapeError(f"int4_rows has no body for a {table.bits}-bit table {table.shape}")
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype != mx.int32:
        raise ShapeError(f"int4_rows takes a row of int32 tokens, not {tokens.shape}")
    target = target or current_target()
    if target is None:
        return embedding_reference(tokens, table, factor)
    V, C = table.shape
    blocks = -(-C // (8 * _THREADS))
    (y,) = KERNEL(
        target,
        [
            tokens,
            table.codes,
            table.scales,
            table.scales if table.biases is None else table.biases,
            constant(factor),
        ],
        template={
            "T": table.scales.dtype,
            "V": V,
            "C": C,
            "GROUP": table.group_size,
            "HAS_BIASES": table.biases is not None,
            "ZERO": table.zero or 0,
        },
        grid=(blocks * _THREADS, tokens.size, 1),
        threadgroup=(_THREADS, 1, 1),
        outputs=[((tokens.size, C), table.scales.dtype)],
    )
    return y

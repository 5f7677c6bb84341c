"""Gemma's embedding: rows times the square root of their length."""

import mlx.core as mx
import numpy as np

from turbospark.kernels.target import KernelSet
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.linear import Embedding
from turbospark.nn.projections import TokenEmbedding


class ScaledEmbedding(TokenEmbedding):
    """Rows of a table [V, C] times sqrt(C).

    Models trained in bfloat16 multiplied by the factor in bfloat16; so the factor is rounded
    where the table's own numbers are bfloat16, and only there.
    """

    def __init__(self, table: Embedding, dims: int) -> None:
        super().__init__(table, dims**0.5)
        self._exact = dims**0.5

    def bind(self, kernels: KernelSet) -> None:
        self._scale = self._factor()
        super().bind(kernels)

    def reference(self, tokens: mx.array) -> mx.array:
        self._scale = self._factor()
        return super().reference(tokens)

    def _factor(self) -> float:
        weight = self._table.value
        dtype = weight.scales.dtype if isinstance(weight, QuantizedWeight) else weight.dtype
        return round_to_bfloat16(self._exact) if dtype == mx.bfloat16 else self._exact


def round_to_bfloat16(value: float) -> float:
    """The bfloat16 number nearest to a float32 one, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    bits += 0x7FFF + ((bits >> 16) & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))

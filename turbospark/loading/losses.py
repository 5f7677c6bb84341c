"""What quantizing a matrix lost, as a whole and in its worst group."""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np

from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Loss:
    """How far a quantized matrix is from the one it was made from.

    Attributes:
        name: the tensor.
        bits: bits of a code.
        group_size: values that share a scale.
        relative: root of the summed squared errors over that of the summed squares.
        worst_group: the largest such ratio among groups that hold an average share of the squares
            or more.
    """

    name: str
    bits: int
    group_size: int
    relative: float
    worst_group: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.bits} bits, groups of {self.group_size}, error "
            f"{100 * self.relative:.2f} %, worst group {100 * self.worst_group:.1f} %"
        )


def loss(name: str, before: mx.array, after: QuantizedWeight) -> Loss:
    """Compare a matrix with its quantized form.

    Args:
        name: the tensor.
        before: [..., N, K].
        after: the same matrix, quantized.
    """
    groups: tuple[int, ...] = (*after.scales.shape, after.group_size)
    dense = before.astype(mx.float32)
    errors = _sums(dense - dequantize_reference(after), groups)
    squares = _sums(dense, groups)
    total = squares.sum()
    loud = squares >= squares.mean()
    ratios = mx.where(loud, errors / mx.maximum(squares, 1e-30), 0.0)
    relative = mx.sqrt(errors.sum() / mx.maximum(total, 1e-30))
    worst = mx.sqrt(ratios.max())
    return Loss(name, after.bits, after.group_size, _number(relative), _number(worst))


def _sums(values: mx.array, groups: tuple[int, ...]) -> mx.array:
    return mx.square(mx.reshape(values, groups)).sum(axis=-1)


def _number(value: mx.array) -> float:
    return float(cast("Any", np.asarray(value)))

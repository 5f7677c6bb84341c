"""Modules that hold weights. They do no arithmetic of their own: units do."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import ShapeError
from turbospark.kernels.weights import Norm, QuantizedWeight, Weight


class Matrix(nn.Module):
    """A weight [..., N, K], dense or quantized, with an optional bias [..., N].

    Parameters are named as in checkpoints: `weight`, `scales`, `biases` (quantization offsets)
    and `bias`. `assign` takes either kind of weight; `value` gives it back.
    """

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros(shape)
        if bias:
            self.bias = mx.zeros(shape[:-1])
        self._shape = shape
        self._layout: dict[str, Any] | None = None

    @property
    def value(self) -> Weight:
        """The weight as kernels take it."""
        if self._layout is None:
            return self.weight
        arrays = cast("dict[str, mx.array]", self)
        return QuantizedWeight(self.weight, arrays["scales"], arrays.get("biases"), **self._layout)

    def assign(self, weight: Weight) -> None:
        """Set the weight.

        Raises:
            ShapeError: it stands for another shape than the module was made for.
        """
        if tuple(weight.shape) != self._shape:
            raise ShapeError(f"weight {tuple(weight.shape)} given where {self._shape} is needed")
        for name in ("scales", "biases"):
            self.pop(name, None)
        if not isinstance(weight, QuantizedWeight):
            self._layout = None
            self.weight = weight
            return
        self._layout = {
            "bits": weight.bits,
            "group_size": weight.group_size,
            "zero": weight.zero,
            "mode": weight.mode,
        }
        self.weight, self.scales = weight.codes, weight.scales
        if weight.biases is not None:
            self.biases = weight.biases


class Linear(Matrix):
    """A projection [out, in]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(outputs, inputs, bias=bias)


class Embedding(Matrix):
    """A table of rows [vocab, dims]; may serve as the output head too."""

    def __init__(self, count: int, dims: int) -> None:
        super().__init__(count, dims)


class RMSNorm(nn.Module):
    """An RMS norm's weight [dims]; `offset` 1 is Gemma 3's way of storing weight - 1."""

    def __init__(self, dims: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self._eps, self._offset = eps, offset
        self._folded: tuple[mx.array, Norm] | None = None

    @property
    def value(self) -> Norm:
        """The norm as kernels take it, the offset folded in in float32.

        It is one array as long as the weight is: the first pass makes the sum, later ones read it.
        """
        if not self._offset:
            return Norm(self.weight, self._eps)
        if self._folded is None or self._folded[0] is not self.weight:
            weight = self.weight.astype(mx.float32) + self._offset
            self._folded = self.weight, Norm(weight, self._eps)
        return self._folded[1]


def bias_of(module: Matrix) -> mx.array | None:
    """A matrix's bias, or None."""
    return cast(Any, module).get("bias")


def norm_of(norm: RMSNorm | Norm | None) -> Norm | None:
    """A norm as kernels take it, or None."""
    return norm.value if isinstance(norm, RMSNorm) else norm

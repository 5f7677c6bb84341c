"""The bound units of the host target: one call from Python to C++ each."""

import ctypes
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.errors import OptionError
from turbospark.kernels.host.library import (
    MODES,
    Host,
    Outputs,
    check_columns,
    readable,
)
from turbospark.kernels.host.products import HostMatrices, HostNorm, Products
from turbospark.kernels.weights import Activation, Norm, Weight
from turbospark.protocols import Phase

_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu_erf")
_SETUP = (("threads", ctypes.c_int32), ("mode", ctypes.c_int32))
_POINTER, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _ProjectionsPlan(ctypes.Structure):
    _fields_ = (*_SETUP, ("norm", _POINTER), ("matrices", _POINTER), ("count", _COUNT))


class _ResidualPlan(ctypes.Structure):
    _fields_ = (*_SETUP, ("matrix", _POINTER), ("post_norm", _POINTER))


class _GatedPlan(ctypes.Structure):
    _fields_ = (
        *_SETUP,
        ("norm", _POINTER),
        ("gate", _POINTER),
        ("up", _POINTER),
        ("down", _POINTER),
        ("post_norm", _POINTER),
        ("activation", _FLAG),
        ("residual", _FLAG),
    )


class _HeadPlan(ctypes.Structure):
    _fields_ = (
        *_SETUP,
        ("norm", _POINTER),
        ("matrix", _POINTER),
        ("softcap", ctypes.c_float),
    )


class _EmbeddingPlan(ctypes.Structure):
    _fields_ = (*_SETUP, ("table", _POINTER), ("scale", ctypes.c_float))


class _Call:
    """A plan, what it points to, and the C++ function that runs it."""

    def __init__(
        self,
        host: Host,
        function: str,
        arguments: Sequence[Any],
        matrices: HostMatrices,
        norms: Sequence[HostNorm],
    ) -> None:
        self._function = host.library[function]  # a function object of its own, by index
        self._function.argtypes = (_POINTER, *arguments)
        self._function.restype = None
        self._matrices, self._norms = matrices, norms
        self._ready = False
        self._setup = (host.threads, MODES.index(host.activations))

    def _set_plan(self, plan: ctypes.Structure) -> None:
        self._kept_plan, self._plan = plan, ctypes.addressof(plan)

    def _settle(self) -> None:
        self._matrices.settle()
        self._ready = True


class Projections(_Call):
    """`normed_projections`."""

    def __init__(
        self,
        host: Host,
        products: Products,
        norm: Norm | None,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
    ) -> None:
        matrices, before = HostMatrices(host, products, weights, biases), HostNorm(norm)
        arguments = (_POINTER, _COUNT, _FLAG, _POINTER)
        super().__init__(host, "ts_project", arguments, matrices, [before])
        self._set_plan(_ProjectionsPlan(*self._setup, before.pointer, matrices.at(0), len(weights)))
        self._columns = matrices.columns
        self._outputs = Outputs(*((rows,) for rows in matrices.rows))

    def __call__(self, x: mx.array, phase: Phase) -> tuple[mx.array, ...]:
        if not self._ready:
            self._settle()
        check_columns(x, self._columns, "a projection")
        x, source = readable(x)
        T = x.shape[0]
        place = self._outputs.take(T)
        self._function(self._plan, source, T, phase is Phase.PREFILL, place.address)
        return self._outputs.finish(place)


class ResidualAdd(_Call):
    """`projected_residual`."""

    def __init__(
        self,
        host: Host,
        products: Products,
        weight: Weight,
        bias: mx.array | None,
        post_norm: Norm | None,
    ) -> None:
        matrices, after = HostMatrices(host, products, [weight], [bias]), HostNorm(post_norm)
        arguments = (_POINTER, _POINTER, _COUNT, _FLAG, _POINTER)
        super().__init__(host, "ts_add_projected", arguments, matrices, [after])
        self._set_plan(_ResidualPlan(*self._setup, matrices.at(0), after.pointer))
        self._rows, self._columns = weight.shape
        self._outputs = Outputs((self._rows,))

    def __call__(self, x: mx.array, residual: mx.array, phase: Phase) -> mx.array:
        if not self._ready:
            self._settle()
        check_columns(x, self._columns, "a residual projection")
        check_columns(residual, self._rows, "its residual")
        x, source = readable(x)
        residual, added = readable(residual)
        T = x.shape[0]
        place = self._outputs.take(T)
        prefill = phase is Phase.PREFILL
        self._function(self._plan, source, added, T, prefill, place.address)
        return self._outputs.finish(place)[0]


class Gated(_Call):
    """`gated_mlp`."""

    def __init__(
        self,
        host: Host,
        products: Products,
        norms: tuple[Norm | None, Norm | None],
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
        activation: Activation,
        residual: bool,
    ) -> None:
        matrices = HostMatrices(host, products, weights, biases)
        before, after = HostNorm(norms[0]), HostNorm(norms[1])
        arguments = (_POINTER, _COUNT, _FLAG, _POINTER)
        super().__init__(host, "ts_gated_mlp", arguments, matrices, [before, after])
        plan = _GatedPlan(
            *self._setup,
            before.pointer,
            *(matrices.at(index) for index in range(3)),
            after.pointer,
            _ACTIVATIONS.index(activation),
            residual,
        )
        self._set_plan(plan)
        self._columns = matrices.columns
        self._outputs = Outputs((weights[2].shape[0],))

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        if not self._ready:
            self._settle()
        check_columns(h, self._columns, "a gated MLP")
        h, source = readable(h)
        T = h.shape[0]
        place = self._outputs.take(T)
        self._function(self._plan, source, T, phase is Phase.PREFILL, place.address)
        return self._outputs.finish(place)[0]


class Head(_Call):
    """`output_head`."""

    def __init__(
        self,
        host: Host,
        products: Products,
        norm: Norm | None,
        weight: Weight,
        bias: mx.array | None,
        softcap: float | None,
    ) -> None:
        matrices, before = HostMatrices(host, products, [weight], [bias]), HostNorm(norm)
        arguments = (_POINTER, _COUNT, _POINTER)
        super().__init__(host, "ts_head", arguments, matrices, [before])
        self._set_plan(_HeadPlan(*self._setup, before.pointer, matrices.at(0), softcap or 0.0))
        rows, self._columns = weight.shape
        self._outputs = Outputs((rows,))

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        if not self._ready:
            self._settle()
        check_columns(h, self._columns, "the head")
        h, source = readable(h)
        T = h.shape[0]
        place = self._outputs.take(T)
        self._function(self._plan, source, T, place.address)
        return self._outputs.finish(place)[0]


class EmbeddingRows(_Call):
    """`embedding`."""

    def __init__(self, host: Host, products: Products, weight: Weight, scale: float) -> None:
        matrices = HostMatrices(host, products, [weight], [None])
        super().__init__(host, "ts_embed", (_POINTER, _COUNT, _POINTER), matrices, [])
        self._set_plan(_EmbeddingPlan(*self._setup, matrices.at(0), scale))
        self._rows, columns = weight.shape
        self._outputs = Outputs((columns,))

    def __call__(self, tokens: mx.array) -> mx.array:
        if not self._ready:
            self._settle()
        ids = np.ascontiguousarray(np.asarray(tokens), np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._rows:
            raise OptionError(
                f"token ids {ids.min()}..{ids.max()} do not fit a table of {self._rows} rows"
            )
        place = self._outputs.take(ids.size)
        self._function(self._plan, ids.ctypes.data, ids.size, place.address)
        return self._outputs.finish(place)[0]

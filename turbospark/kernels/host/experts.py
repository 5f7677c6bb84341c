"""The bound unit of routed experts on the host: one call from Python to C++."""

import ctypes
from typing import Any

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.host.library import MODES, Host, Outputs, check_columns, readable
from turbospark.kernels.host.products import HostNorm, HostStacks, Products
from turbospark.kernels.target import SharedRows
from turbospark.kernels.weights import ClampedSwiGLU, ExpertWeights, Norm
from turbospark.protocols import Phase

_ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf")
_CLAMPED = 3
_POINTER, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Plan(ctypes.Structure):
    """`ts::ExpertsPlan`."""

    _fields_ = (
        ("threads", _FLAG),
        ("mode", _FLAG),
        ("norm", _POINTER),
        ("gate", _POINTER),
        ("up", _POINTER),
        ("down", _POINTER),
        ("scale", _POINTER),
        ("count", _COUNT),
        ("top_k", _COUNT),
        ("renormalise", _FLAG),
        ("activation", _FLAG),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class ExpertMix:
    """`routed_experts`."""

    def __init__(
        self, host: Host, products: Products, norm: Norm | None, experts: ExpertWeights
    ) -> None:
        weights = [experts.gate, experts.up, experts.down]
        self._stacks = HostStacks(host, products, weights, experts.biases)
        self._norm = HostNorm(norm)
        self._count, _, self._columns = experts.gate.shape
        scale_at = None
        if experts.scale is not None:
            self._scale, scale_at = readable(experts.scale)
        activation = experts.activation
        clamped = activation if isinstance(activation, ClampedSwiGLU) else None
        self._plan = _Plan(
            host.threads,
            MODES.index(host.activations),
            self._norm.pointer,
            *(self._stacks.at(index) for index in range(3)),
            scale_at,
            self._count,
            experts.top_k,
            experts.renormalise,
            _CLAMPED if clamped else _ACTIVATIONS.index(activation),
            clamped.alpha if clamped else 0.0,
            clamped.limit if clamped else 0.0,
        )
        self._plan_at = ctypes.addressof(self._plan)
        self._outputs = Outputs((experts.down.shape[1],))
        self._ready = False
        self._function: Any = host.library["ts_mix_experts"]
        self._function.argtypes = [*[_POINTER] * 5, _COUNT, _FLAG, _POINTER]
        self._function.restype = None

    def __call__(
        self, h: mx.array, scores: mx.array, shared: SharedRows | None, phase: Phase
    ) -> mx.array:
        if not self._ready:
            self._stacks.settle()
            self._ready = True
        check_columns(h, self._columns, "an expert")
        check_columns(scores, self._count, "a choice of experts")
        T = h.shape[0]
        given = [readable(h), readable(scores)]
        if shared is not None:
            check_columns(shared[0], self._columns, "a sum of experts")
            check_columns(shared[1], 1, "a shared expert's gate")
            given += [readable(shared[0]), readable(shared[1])]
        if any(array.shape[0] != T for array, _ in given):
            raise ShapeError(f"experts take as many rows of everything as of h, which has {T}")
        places = [at for _, at in given] + [None] * (4 - len(given))
        place = self._outputs.take(T)
        prefill = phase is Phase.PREFILL
        self._function(self._plan_at, *places, T, prefill, place.address)
        return self._outputs.finish(place)[0]

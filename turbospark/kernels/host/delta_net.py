"""The bound delta-net unit of the host target: one call from Python to C++."""

import ctypes
import struct
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.errors import ShapeError
from turbospark.kernels.delta_net import DeltaRows, check_delta_weights
from turbospark.kernels.host.library import Host, Outputs, address, check_columns, readable
from turbospark.kernels.target import DeltaGeometry, DeltaInputs, DeltaState
from turbospark.kernels.weights import DeltaWeights
from turbospark.protocols import Phase


class _Plan(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_int32),
        ("key_heads", ctypes.c_int32),
        ("value_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("taps", ctypes.c_int32),
        ("conv", ctypes.c_void_p),
        ("rate", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("sigmoid_gate", ctypes.c_int32),
    )


# DeltaCall of native/delta_net.h; packed bytes are cheaper to make than a ctypes structure.
_pack = struct.Struct("@14q").pack


class DeltaStep:
    """`delta_net`. The rows come one after another in both phases, so their number is no matter.

    Raises:
        ShapeError: the weights are not those of `heads`.
    """

    def __init__(self, host: Host, heads: DeltaGeometry, weights: DeltaWeights) -> None:
        check_delta_weights(heads, weights)
        self._heads = heads
        conv = _floats(weights.conv)[:, :, 0]
        norm = weights.norm.weight
        self._kept = [
            np.ascontiguousarray(conv.T),
            -np.exp(_floats(weights.log_rate)),
            _floats(weights.dt_bias),
            None if norm is None else _floats(norm),
        ]
        sizes = (heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim)
        arrays = (None if array is None else address(array) for array in self._kept)
        gate = weights.gate == "sigmoid"
        self._plan = _Plan(host.threads, *sizes, heads.taps, *arrays, weights.norm.eps, gate)
        self._plan_at = ctypes.addressof(self._plan)
        Hk, Hv = heads.num_key_heads, heads.num_value_heads
        self._plain = Outputs((heads.values,))
        noted = ((Hk, heads.key_dim), (Hv, heads.value_dim), (Hv,), (Hv,))
        self._recorded = Outputs((heads.values,), *noted)
        self._step = _function(host, "ts_delta_net")
        self._fold = _function(host, "ts_delta_fold")

    def __call__(
        self, inputs: DeltaInputs, state: DeltaState, phase: Phase, record: bool
    ) -> tuple[mx.array, DeltaState, DeltaRows | None]:
        """The unit's call; the new state is memory of its own."""
        heads, T = self._heads, inputs.qkv.shape[0]
        check_columns(inputs.qkv, heads.channels, "a delta net's qkv")
        check_columns(inputs.z, heads.values, "a delta net's z")
        for gate in (inputs.b, inputs.a):
            check_columns(gate, heads.num_value_heads, "a delta net's gate")
        if T == 0 or {inputs.z.shape[0], inputs.b.shape[0], inputs.a.shape[0]} != {T}:
            raise ShapeError("a delta net takes as many rows of z, b and a as of qkv, at least one")
        arrays = [inputs.qkv, inputs.z, inputs.b, inputs.a, *state]
        given = [readable(array) for array in arrays]
        after = tuple(_fresh(array.shape) for array in state)
        place = (self._recorded if record else self._plain).take(T)
        written = [address(array) for array in (*after, *place.parts)]
        unused = [0] * (7 - len(written))
        self._step(self._plan_at, _pack(*(at for _, at in given), *written, *unused, T))
        if not record:
            (out,) = self._plain.finish(place)
            return out, after, None
        out, k, v, decay, beta = self._recorded.finish(place)
        return out, after, DeltaRows(state, given[0][0], k, v, decay, beta, self.fold)

    def fold(self, rows: DeltaRows) -> mx.array:
        """The fast weights after recorded rows, bit for bit as a step leaves them."""
        state, state_at = readable(rows.state[1])
        given = [readable(array) for array in (rows.k, rows.v, rows.decay, rows.beta)]
        after = _fresh(state.shape)
        unused = [0] * 5
        places = [state_at, 0, address(after), 0, *(at for _, at in given), rows.rows]
        self._fold(self._plan_at, _pack(*unused, *places))
        return after


def _function(host: Host, name: str) -> Any:
    function = host.library[name]
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return function


def _floats(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), dtype=np.float32)


def _fresh(shape: tuple[int, ...]) -> mx.array:
    """Memory that C++ fills and nobody else holds."""
    return mx.zeros(shape, mx.float32)

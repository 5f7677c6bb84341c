"""The bound unit of hyper-connections on the host: one call from Python to C++."""

import ctypes
import struct
from typing import Any

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.host.library import MODES, Host, Outputs, address, check_columns, readable
from turbospark.kernels.host.products import HostMatrices, HostNorm, Products
from turbospark.kernels.target import Said
from turbospark.kernels.weights import StreamWeights
from turbospark.protocols import Phase

_POINTER, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Plan(ctypes.Structure):
    """`ts::StreamsPlan`."""

    _fields_ = (
        ("threads", _FLAG),
        ("mode", _FLAG),
        ("norm", _POINTER),
        ("down", _POINTER),
        ("inject", _POINTER),
        ("up", _POINTER),
        ("groups", _COUNT),
    )


_pack = struct.Struct("@8q").pack  # `ts::StreamsCall`


class StreamMix:
    """`mix_streams`."""

    def __init__(self, host: Host, products: Products, weights: StreamWeights) -> None:
        inject = weights.inject
        matrices = [weights.down, weights.up, *([] if inject is None else [inject])]
        self._matrices = HostMatrices(host, products, matrices, [None] * len(matrices))
        self._norm = HostNorm(weights.norm)
        self._plan = _Plan(
            host.threads,
            MODES.index(host.activations),
            self._norm.pointer,
            self._matrices.at(0),
            None if inject is None else self._matrices.at(2),
            self._matrices.at(1),
            weights.groups,
        )
        self._plan_at = ctypes.addressof(self._plan)
        self._streams, self._groups = weights.up.shape[0], weights.groups
        self._columns = self._streams // self._groups
        shares = [] if inject is None else [(self._groups,)]
        self._bare = Outputs((self._columns,), *shares)
        self._whole = Outputs((self._columns,), *shares, (self._streams,))
        self._has_shares = inject is not None
        self._ready = False
        self._function: Any = host.library["ts_mix_streams"]
        self._function.argtypes = [_POINTER, ctypes.c_char_p]
        self._function.restype = None

    def __call__(
        self, h: mx.array, said: Said | None, phase: Phase
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """The unit's call."""
        if not self._ready:
            self._matrices.settle()
            self._ready = True
        check_columns(h, self._streams, "a mixture of streams")
        h, source = readable(h)
        T, given = h.shape[0], [0, 0]
        kept: list[mx.array] = []
        if said is not None:
            check_columns(said[0], self._columns, "what a block said")
            check_columns(said[1], self._groups, "its shares")
            if {part.shape[0] for part in said} != {T}:
                raise ShapeError(f"a block said {said[0].shape} in {said[1].shape} to {T} rows")
            kept, given = (list(part) for part in zip(*map(readable, said), strict=True))
        outputs = self._bare if said is None else self._whole
        place = outputs.take(T)
        mixed, *rest = map(address, place.parts)
        opened = rest.pop(0) if self._has_shares else 0
        after = rest[0] if rest else 0
        prefill = phase is Phase.PREFILL
        call = _pack(source, *given, T, prefill, after, mixed, opened)
        self._function(self._plan_at, call)
        del kept
        made = list(outputs.finish(place))
        return (
            made.pop() if said is not None else h,
            made[0],
            made[1] if self._has_shares else None,
        )

"""Host bodies of attention: head norms with RoPE and cache rows, and attention over a cache."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from turbospark.errors import KernelError, ShapeError
from turbospark.kernels.attention import first_key
from turbospark.kernels.host.library import Host, Outputs, address, check_columns, readable
from turbospark.kernels.kv_rows import KVRows, RowBlock, RowStore
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase

Floats = NDArray[np.float32]


class _NormPlan(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("enabled", ctypes.c_int32),
    )


class _RotatePlan(ctypes.Structure):
    _fields_ = (
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("traditional", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("q", _NormPlan),
        ("k", _NormPlan),
        ("v", _NormPlan),
    )


class _AttendPlan(ctypes.Structure):
    _fields_ = (
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


# Packed bytes are cheaper to make than a ctypes structure; they are RotateCall, AttendCall and
# ChosenCall of native/attention.h.
_pack_rotate = struct.Struct("@11q").pack
_pack_attend = struct.Struct("@11q").pack
_pack_chosen = struct.Struct("@14q").pack


class RotatedHeads:
    """Per-head norms, RoPE on q and k, k and v rows written in place into the cache.

    Raises:
        ShapeError: a norm or the embedding is made for another head size.
    """

    def __init__(
        self, host: Host, heads: HeadGeometry, norms: Sequence[Norm | None], rope: Rope
    ) -> None:
        D, pairs = heads.head_dim, len(rope.inv_freq)
        if rope.head_dim != D or 2 * pairs > D:
            raise ShapeError(f"RoPE of {pairs} pairs of {rope.head_dim} given for heads of {D}")
        self._weights = [_norm_weight(norm, D) for norm in norms]
        plans = map(_norm_plan, norms, self._weights)
        sizes = (heads.num_heads, heads.num_kv_heads, D)
        self._plan = _RotatePlan(*sizes, pairs, rope.traditional, host.threads, *plans)
        self._plan_at = ctypes.addressof(self._plan)
        self._call = _function(host, "ts_head_norm_rope")
        self._heads, self._rope = heads, rope
        self._outputs = Outputs((heads.num_heads, D))

    def __call__(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, cache: RowStore, phase: Phase
    ) -> mx.array:
        """The unit's call: q [T, Hq * D], k and v [T, Hkv * D] or None -> [T, Hq, D]."""
        heads, count = self._heads, q.shape[0]
        check_columns(q, heads.num_heads * heads.head_dim, "HeadNormRope's q")
        q, q_at = readable(q)
        place = self._outputs.take(count)
        out_at = place.address
        if k is None or v is None:
            cos, sin = self._rope.rotation(cache.offset - count, count)
            tables = (address(cos), address(sin))
            self._call(self._plan_at, _pack_rotate(q_at, 0, 0, *tables, out_at, 0, 0, 0, 0, count))
            return self._outputs.finish(place)[0]
        check_columns(k, heads.num_kv_heads * heads.head_dim, "HeadNormRope's k")
        check_columns(v, heads.num_kv_heads * heads.head_dim, "HeadNormRope's v")
        k, k_at = readable(k)
        v, v_at = readable(v)
        cos, sin = self._rope.rotation(cache.offset, count)
        tables = (address(cos), address(sin))
        block, row = cache.reserve(count)
        rows = (*_addresses(block), block.capacity, row)
        self._call(self._plan_at, _pack_rotate(q_at, k_at, v_at, *tables, out_at, *rows, count))
        cache.advance(count)
        return self._outputs.finish(place)[0]


class Attention:
    """Causal attention over a cache's float32 rows."""

    def __init__(
        self,
        host: Host,
        heads: HeadGeometry,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> None:
        self._sinks = None if sinks is None else _floats(sinks)
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        sinks_at = None if self._sinks is None else address(self._sinks)
        self._plan = _AttendPlan(*sizes, window or 0, host.threads, scale, sinks_at)
        self._plan_at = ctypes.addressof(self._plan)
        self._prefill = _function(host, "ts_attend_prefill")
        self._decode = _function(host, "ts_attend_decode")
        self._heads, self._window = heads, window
        self._outputs = Outputs((heads.num_heads * heads.head_dim,))

    def __call__(self, q: mx.array, cache: RowStore, phase: Phase) -> mx.array:
        """The unit's call: q [T, Hq, D] -> [T, Hq * D]."""
        Hq, D, count = self._heads.num_heads, self._heads.head_dim, q.shape[0]
        if q.shape != (count, Hq, D):
            raise ShapeError(f"Attend takes [T, {Hq}, {D}], not {q.shape}")
        rows = cache.rows()
        first_key(rows, count, self._window)
        q, q_at = readable(q)
        place = self._outputs.take(count)
        call = self._decode if phase is Phase.DECODE else self._prefill
        call(self._plan_at, _pack_attend(q_at, place.address, *_cache_rows(rows), count))
        return self._outputs.finish(place)[0]


class ChosenAttention:
    """Attention to rows that every query names."""

    def __init__(self, host: Host, heads: HeadGeometry, scale: float) -> None:
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        self._plan = _AttendPlan(*sizes, 0, host.threads, scale, None)
        self._plan_at = ctypes.addressof(self._plan)
        self._call = _function(host, "ts_attend_chosen")
        self._heads = heads
        self._outputs = Outputs((heads.num_heads * heads.head_dim,))

    def __call__(
        self, q: mx.array, rows: KVRows, positions: mx.array, lengths: Sequence[int]
    ) -> mx.array:
        """Q [T, Hq, D], positions [T, L] of which a row reads the first ones -> [T, Hq * D]."""
        (count, most), heads = positions.shape, self._heads
        if q.shape != (count, heads.num_heads, heads.head_dim) or len(lengths) != count:
            raise ShapeError(f"queries {q.shape} with positions {positions.shape} of their rows")
        if not all(0 < length <= most for length in lengths):
            raise ShapeError(f"lengths {lengths} of rows that name {most} positions")
        q, q_at = readable(q)
        chosen, sizes = mx.contiguous(positions.astype(mx.int32)), np.array(lengths, np.int64)
        place = self._outputs.take(count)
        given = (*_cache_rows(rows), address(chosen), address(sizes), most, count)
        self._call(self._plan_at, _pack_chosen(q_at, place.address, *given))
        return self._outputs.finish(place)[0]


def _function(host: Host, name: str) -> Any:
    function = host.library[name]
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return function


def _floats(x: mx.array) -> Floats:
    return np.array(x.astype(mx.float32), dtype=np.float32)


def _norm_weight(norm: Norm | None, head_dim: int) -> Floats | None:
    if norm is None or norm.weight is None:
        return None
    if norm.weight.shape != (head_dim,):
        raise ShapeError(f"norm weight {norm.weight.shape} given for heads of {head_dim}")
    return _floats(norm.weight)


def _norm_plan(norm: Norm | None, weight: Floats | None) -> _NormPlan:
    if norm is None:
        return _NormPlan(None, 0.0, False)
    return _NormPlan(None if weight is None else address(weight), norm.eps, True)


def _cache_rows(rows: KVRows) -> tuple[int, ...]:
    sealed, tail, _, boundary, end = rows
    sealed_k, sealed_v = _addresses(sealed) if sealed else (0, 0)
    tail_k, tail_v = _addresses(tail) if tail else (0, 0)
    capacities = (sealed.capacity if sealed else 0, tail.capacity if tail else 0)
    return (sealed_k, sealed_v, tail_k, tail_v, *capacities, boundary, end)


def _addresses(block: RowBlock) -> tuple[int, int]:
    if block.addresses is None:
        if block.k.dtype != mx.float32 or block.v.dtype != mx.float32:
            raise KernelError(f"host attention reads float32 rows, not {block.k.dtype}")
        block.addresses = address(block.k), address(block.v)
    return block.addresses

"""Host bodies of attention: head norms with RoPE and cache rows, and attention over a cache."""

import ctypes
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.errors import KernelError, ShapeError
from turbospark.kernels.attention import first_key
from turbospark.kernels.host.library import Host, address, check_columns, readable, result
from turbospark.kernels.kv_rows import KVRows, RowBlock, RowStore
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import Attend, HeadGeometry, Rotate
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase


class _NormPlan(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("enabled", ctypes.c_int32),
    )


class _HeadPlan(ctypes.Structure):
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


class _CacheRows(ctypes.Structure):
    _fields_ = (
        ("sealed_k", ctypes.c_void_p),
        ("sealed_v", ctypes.c_void_p),
        ("tail_k", ctypes.c_void_p),
        ("tail_v", ctypes.c_void_p),
        ("sealed_capacity", ctypes.c_int64),
        ("tail_capacity", ctypes.c_int64),
        ("boundary", ctypes.c_int64),
        ("end", ctypes.c_int64),
    )


def bind_head_norm_rope(
    host: Host,
    heads: HeadGeometry,
    q_norm: Norm | None,
    k_norm: Norm | None,
    v_norm: Norm | None,
    rope: Rope,
) -> Rotate:
    """Per-head norms, RoPE on q and k, k and v rows written in place into the cache.

    Raises:
        ShapeError: the embedding is made for another head size.
    """
    Hq, Hkv, D = heads.num_heads, heads.num_kv_heads, heads.head_dim
    pairs = len(rope.inv_freq)
    if rope.head_dim != D or 2 * pairs > D:
        raise ShapeError(
            f"RoPE of {pairs} pairs in heads of {rope.head_dim} given for heads of {D}"
        )
    kept: list[np.ndarray] = []
    norms = [_norm_plan(norm, D, kept) for norm in (q_norm, k_norm, v_norm)]
    plan = _HeadPlan(Hq, Hkv, D, pairs, rope.traditional, host.threads, *norms)
    call = _function(host, "ts_head_norm_rope", pointers=9, counts=3)
    plan_at = ctypes.addressof(plan)

    def rotate(
        q: mx.array, k: mx.array | None, v: mx.array | None, cache: RowStore, phase: Phase
    ) -> mx.array:
        check_columns(q, Hq * D, "HeadNormRope's q")
        count = q.shape[0]
        q, q_at = readable(q)
        out = np.empty((count, Hq, D), np.float32)
        if k is None or v is None:
            cos, sin = rope.rotation(cache.offset - count, count)
            tables = address(cos), address(sin)
            call(plan_at, q_at, None, None, *tables, address(out), None, None, 0, 0, count)
            return result(out)
        check_columns(k, Hkv * D, "HeadNormRope's k")
        check_columns(v, Hkv * D, "HeadNormRope's v")
        k, k_at = readable(k)
        v, v_at = readable(v)
        cos, sin = rope.rotation(cache.offset, count)
        tables = address(cos), address(sin)
        block, row = cache.reserve(count)
        rows = _addresses(block)
        capacity = block.capacity
        call(plan_at, q_at, k_at, v_at, *tables, address(out), *rows, capacity, row, count)
        cache.advance(count)
        return result(out)

    rotate.kept = (plan, kept)  # type: ignore[attr-defined]
    return rotate


def bind_attend(
    host: Host, heads: HeadGeometry, scale: float, window: int | None, sinks: mx.array | None
) -> Attend:
    """Causal attention over a cache's float32 rows."""
    Hq, Hkv, D = heads.num_heads, heads.num_kv_heads, heads.head_dim
    sink_values = None if sinks is None else np.array(sinks.astype(mx.float32))
    sinks_at = None if sink_values is None else address(sink_values)
    plan = _AttendPlan(Hq, Hkv, D, window or 0, host.threads, scale, sinks_at)
    calls = {
        Phase.PREFILL: _function(host, "ts_attend_prefill", pointers=4, counts=1),
        Phase.DECODE: _function(host, "ts_attend_decode", pointers=4, counts=1),
    }
    plan_at = ctypes.addressof(plan)

    def attend(q: mx.array, cache: RowStore, phase: Phase) -> mx.array:
        count = q.shape[0]
        if q.shape != (count, Hq, D):
            raise ShapeError(f"Attend takes [T, {Hq}, {D}], not {q.shape}")
        rows = cache.rows()
        first_key(rows, count, window)
        q, q_at = readable(q)
        out = np.empty((count, Hq * D), np.float32)
        calls[phase](plan_at, q_at, address(out), ctypes.byref(_cache_rows(rows)), count)
        return result(out)

    attend.kept = (plan, sink_values)  # type: ignore[attr-defined]
    return attend


def _function(host: Host, name: str, *, pointers: int, counts: int) -> Any:
    function = host.library[name]
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * counts
    return function


def _norm_plan(norm: Norm | None, head_dim: int, kept: list[np.ndarray]) -> _NormPlan:
    if norm is None:
        return _NormPlan(None, 0.0, False)
    if norm.weight is None:
        return _NormPlan(None, norm.eps, True)
    if norm.weight.shape != (head_dim,):
        raise ShapeError(f"norm weight {norm.weight.shape} given for heads of {head_dim}")
    kept.append(np.array(norm.weight.astype(mx.float32)))
    return _NormPlan(address(kept[-1]), norm.eps, True)


def _cache_rows(rows: KVRows) -> _CacheRows:
    sealed, tail = rows.sealed, rows.tail
    return _CacheRows(
        *(_addresses(sealed) if sealed else (None, None)),
        *(_addresses(tail) if tail else (None, None)),
        sealed.capacity if sealed else 0,
        tail.capacity if tail else 0,
        rows.boundary,
        rows.end,
    )


def _addresses(block: RowBlock) -> tuple[int, int]:
    if block.addresses is None:
        if block.k.dtype != mx.float32 or block.v.dtype != mx.float32:
            raise KernelError(f"host attention reads float32 rows, not {block.k.dtype}")
        block.addresses = address(block.k), address(block.v)
    return block.addresses

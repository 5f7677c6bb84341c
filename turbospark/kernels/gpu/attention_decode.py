"""Attention of up to eight query rows over a cache: chunks of keys, then a pass that joins them.

A cache that is one chunk of keys needs no second pass.

Its reference is `attend_reference` of kernels/attention.py.
"""

import functools

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.attention import attend_reference, first_key
from turbospark.kernels.gpu import attention_geometry as geometry
from turbospark.kernels.gpu.kernel import (
    GpuTarget,
    Kernel,
    constant,
    current_target,
    resident,
)
from turbospark.kernels.kv_rows import KVRows, RowBlock, StepRows
from turbospark.kernels.target import HeadGeometry

_INPUTS = ("q", "sealed_k", "sealed_v", "tail_k", "tail_v", "lengths", "scale", "sinks")
PARTIALS = Kernel("attention_partials", _INPUTS, ("y",))
TENSOR = Kernel("attention_tensor", _INPUTS, ("y",), only="cuda", helpers=("cuda_tensor.h",))
COMBINE = Kernel(
    "attention_combine", ("parts", "lengths", "sinks", "gate"), ("y",), takes_strides=True
)
MAX_ROWS = 8

Sizes = dict[str, mx.Dtype | int | bool]


def attention_decode(
    q: mx.array,
    rows: KVRows,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    *,
    target: GpuTarget | None = None,
) -> mx.array:
    """softmax(q k^T scale) v, where a query sees itself and what came before it.

    On one target each row's result is the same, bit for bit, whatever rows stand beside it.

    Args:
        q: [T, Hq, D], 1 to 8 rows; row i stands at position rows.end - T + i, its own key is in
            `rows`.
        rows: the cache's keys and values; Hkv divides Hq, query head h reads head h * Hkv // Hq.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: [Hq] scores that join each head's softmax and add no value.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.

    Returns:
        [T, Hq * D] in the dtype of `q`, computed in float32.

    Raises:
        ShapeError: `q` is outside these bounds, or the cache no longer holds a row that a query
            must see.
    """
    sealed, tail = _blocks(rows)
    _check(q, sealed.k, sinks)
    T = q.shape[0]
    if rows.end < T:
        raise ShapeError(f"attention_decode takes 1 to {rows.end} query rows here, not {T}")
    target = target or current_target()
    if target is None:
        return attend_reference(q, rows, scale, window, sinks)
    first_key(rows, T, window)
    step = StepRows(sealed, tail, lengths_of(rows.boundary, rows.end - T))
    return attention_step(q, step, scale, window, sinks, target=target)


def attention_step(
    q: mx.array,
    rows: StepRows,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    gate: mx.array | None = None,
    *,
    target: GpuTarget,
) -> mx.array:
    """The same where positions are arrays, so that a compiled step serves every length.

    Args:
        q: [T, Hq, D]; row i stands at position rows.lengths[1] + i, its own key is in `rows`.
        rows: what the step reads.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: [Hq] scores that join each head's softmax and add no value.
        gate: [T, Hq * D], or [T, Hq, n] with n >= D whose first D numbers of a head count; the
            result is multiplied by its sigmoid. Strides of all but the first axis are dense.
        target: where.

    Returns:
        [T, Hq * D] in the dtype of `q`.

    Raises:
        ShapeError: shapes do not fit.
    """
    heads = _check(q, rows.sealed.k, sinks)
    (T, Hq, D), lanes = q.shape, geometry.combine_lanes(heads.head_dim)
    if gate is not None and (gate.shape[0] != T or gate.size < T * Hq * D):
        raise ShapeError(f"attention of q {q.shape} takes a gate {(T, Hq * D)}, not {gate.shape}")
    tensor = target.own == "cuda" and geometry.has_tensor_shape(D, q.dtype, rows.sealed.k.dtype)
    cut = geometry.chunks(heads, window, tensor=tensor)
    sizes: Sizes = {
        "M": T,
        "D": D,
        "HEADS": Hq,
        "CHUNK": cut.size,
        "FIRST": cut.first,
        "WINDOW": window or 0,
    }
    kernel, threads, tiles, shape = _tensor(heads, q) if tensor else _vector(heads, q, rows)
    splits = _splits(cut, rows, T, window)
    is_whole = splits == 1 and gate is None
    sink_scores = rows.lengths if sinks is None else sinks
    blocks = [rows.sealed.k, rows.sealed.v, rows.tail.k, rows.tail.v]
    (parts,) = kernel(
        target,
        [q, *blocks, rows.lengths, constant(scale), sink_scores],
        template={
            **sizes,
            **shape,
            "SHARE": Hq // heads.num_kv_heads,
            "TILES": tiles,
            "IS_WHOLE": is_whole,
            "HAS_SINKS": sinks is not None,
            "Y": q.dtype if is_whole else mx.float32,
        },
        grid=(threads, heads.num_kv_heads * tiles, splits),
        threadgroup=(threads, 1, 1),
        outputs=[
            ((T, Hq * D), q.dtype) if is_whole else ((splits, T, Hq, D + 4), mx.float32),
        ],
    )
    if is_whole:
        return parts
    (y,) = COMBINE(
        target,
        [parts, rows.lengths, sink_scores, parts if gate is None else gate],
        template={
            **sizes,
            "T": q.dtype,
            "LANES": lanes,
            "THREADS": geometry.COMBINE_THREADS,
            "HAS_SINKS": sinks is not None,
            "HAS_GATE": gate is not None,
            "GATE_STEP": D if gate is None or gate.ndim == 2 else gate.shape[2],
        },
        grid=(geometry.COMBINE_THREADS, T * Hq, D // (4 * lanes)),
        threadgroup=(geometry.COMBINE_THREADS, 1, 1),
        outputs=[((T, Hq * D), q.dtype)],
    )
    return y


@functools.lru_cache(maxsize=4)
def lengths_of(boundary: int, start: int) -> mx.array:
    """What the kernels of a step are told: where the tail begins, where its first row stands."""
    return resident(mx.array([boundary, start], mx.int32))


def takes(heads: HeadGeometry) -> bool:
    """Whether `attention_decode` has a body for this geometry."""
    return geometry.has_vector_shape(heads.head_dim)


def _vector(heads: HeadGeometry, q: mx.array, rows: StepRows) -> tuple[Kernel, int, int, Sizes]:
    """The body that every target has: threads, tiles of queries, template."""
    shape = geometry.vector_shape(heads, q.shape[0])
    sizes: Sizes = {
        "KV": rows.sealed.k.dtype,
        "QUERIES": shape.queries,
        "LANES": shape.lanes,
        "QUADS": shape.quads,
        "BATCH": min(shape.lanes, 4),
        "SIMDGROUPS": geometry.SIMDGROUPS,
    }
    tiles = -(-q.shape[0] * heads.num_heads // (heads.num_kv_heads * shape.queries))
    return PARTIALS, 32 * geometry.SIMDGROUPS, tiles, sizes


def _tensor(heads: HeadGeometry, q: mx.array) -> tuple[Kernel, int, int, Sizes]:
    """The same on tensor cores."""
    shape = geometry.tensor_shape(heads, q.shape[0])
    sizes: Sizes = {
        "T": q.dtype,
        "DIMS": shape.dims,
        "WARPS": shape.warps,
        "KEY_TILES": shape.key_tiles,
        "QUERY_TILES": shape.query_tiles,
    }
    queries = q.shape[0] * heads.num_heads // heads.num_kv_heads
    return TENSOR, 32 * shape.warps, -(-queries // (16 * shape.query_tiles)), sizes


def _check(q: mx.array, keys: mx.array, sinks: mx.array | None) -> HeadGeometry:
    if q.ndim != 3 or not 1 <= q.shape[0] <= MAX_ROWS:
        raise ShapeError(
            f"attention_decode takes 1 to {MAX_ROWS} query rows [T, Hq, D], not q {q.shape}"
        )
    _, Hq, D = q.shape
    Hkv, _, kv_dim = keys.shape
    heads = HeadGeometry(Hq, Hkv, D)
    if kv_dim != D or Hq % Hkv or not takes(heads):
        raise ShapeError(
            f"attention_decode takes head dimensions that are a multiple of 32 up to 512, or of 8 "
            f"where few remain, the same in q {q.shape} and keys {keys.shape}"
        )
    if sinks is not None and sinks.shape != (Hq,):
        raise ShapeError(f"attention_decode takes sinks {(Hq,)}, not {sinks.shape}")
    return heads


def _splits(cut: geometry.Chunks, rows: StepRows, count: int, window: int | None) -> int:
    tail = rows.tail.k.shape[1]
    if rows.sealed is rows.tail:  # every position lies in the tail
        return min(cut.count(tail, count, window), cut.count(tail, count, None))
    return cut.count(rows.sealed.k.shape[1] + tail, count, window)


def _blocks(rows: KVRows) -> tuple[RowBlock, RowBlock]:
    """Sealed rows and tail; the arrays of one stand in where no position lies in the other."""
    sealed, tail = rows.sealed, rows.tail
    if sealed is None:
        if tail is None:
            raise ShapeError("attention_decode over a cache without rows")
        return tail, tail
    return sealed, RowBlock(sealed.k, sealed.v) if tail is None else tail

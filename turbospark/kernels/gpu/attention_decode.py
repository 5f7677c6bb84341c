"""Attention of up to eight query rows over a cache: chunks of keys, then a pass that joins them.

A cache that is one chunk of keys needs no second pass.

Its reference is `attend_reference` of kernels/attention.py.
"""

from dataclasses import dataclass

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.attention import attend_reference, first_key
from turbospark.kernels.gpu import attention_geometry as geometry
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, bounded, constant, current_target
from turbospark.kernels.gpu.step_rows import step_of
from turbospark.kernels.kv_rows import KVRows, StepRows
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
    gate: mx.array | None = None,
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
        gate: as `attention_step` takes it; on a CPU the reference takes none.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.

    Returns:
        [T, Hq * D] in the dtype of `q`, computed in float32.

    Raises:
        ShapeError: `q` is outside these bounds, or the cache no longer holds a row that a query
            must see.
    """
    T = q.shape[0]
    step = step_of(rows, rows.end - T)
    _check(q, step.sealed.k, sinks)
    if rows.end < T:
        raise ShapeError(f"attention_decode takes 1 to {rows.end} query rows here, not {T}")
    target = target or current_target()
    if target is None:
        return attend_reference(q, rows, scale, window, sinks)
    first_key(rows, T, window)
    return attention_step(q, step, scale, window, sinks, gate, target=target)


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
        gate: [T, Hq * D], [T, Hq] with one number a head, or [T, Hq, n] with n >= D whose first D
            of a head count; the result is multiplied by its sigmoid. Only rows may lie apart.
        target: where.

    Returns:
        [T, Hq * D] in the dtype of `q`.

    Raises:
        ShapeError: shapes do not fit.
    """
    heads = _check(q, rows.sealed.k, sinks)
    T, dtype = q.shape[0], q.dtype
    step = plan(heads, T, dtype, rows, window, target=target)
    gate_step(gate, T, heads)
    is_whole = step.splits == 1 and gate is None
    y_shape = (T, heads.num_heads * heads.head_dim)
    blocks = [rows.sealed.k, rows.sealed.v, rows.tail.k, rows.tail.v]
    (y,) = step.kernel(
        target,
        [q, *blocks, rows.lengths, constant(scale), rows.lengths if sinks is None else sinks],
        template={
            **step.template,
            "IS_WHOLE": is_whole,
            "HAS_SINKS": sinks is not None,
            "Y": dtype if is_whole else mx.float32,
        },
        grid=(step.threads, heads.num_kv_heads * step.tiles, step.splits),
        threadgroup=(step.threads, 1, 1),
        outputs=[(y_shape, dtype) if is_whole else (step.parts_shape, mx.float32)],
    )
    return y if is_whole else combine(y, rows, step, sinks, gate, dtype, target=target)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step's attention is launched.

    Attributes:
        heads: of the layer.
        rows: of queries.
        kernel: the body of the first pass.
        threads: of a threadgroup.
        tiles: of a key/value head's queries.
        splits: chunks of keys.
        sizes: what both passes take as template arguments.
        shape: what the first pass takes beside them.
    """

    heads: HeadGeometry
    rows: int
    kernel: Kernel
    threads: int
    tiles: int
    splits: int
    sizes: Sizes
    shape: Sizes

    @property
    def template(self) -> Sizes:
        """Of the first pass."""
        share = self.heads.num_heads // self.heads.num_kv_heads
        return {**self.sizes, **self.shape, "SHARE": share, "TILES": self.tiles, "COPIES": 0}

    @property
    def parts_shape(self) -> tuple[int, ...]:
        """Of what the first pass leaves to the second."""
        return (self.splits, self.rows, self.heads.num_heads, self.heads.head_dim + 4)


def plan(
    heads: HeadGeometry,
    count: int,
    dtype: mx.Dtype,
    rows: StepRows,
    window: int | None,
    *,
    target: GpuTarget,
) -> Plan:
    """Body, tiles and chunks for `count` rows of queries of a dtype."""
    D, keys = heads.head_dim, rows.sealed.k.dtype
    tensor = target.own == "cuda" and geometry.has_tensor_shape(D, dtype, keys)
    cut = geometry.chunks(heads, window, tensor=tensor)
    sizes: Sizes = {
        "M": count,
        "D": D,
        "HEADS": heads.num_heads,
        **cut.template,
        "WINDOW": window or 0,
    }
    tail = rows.tail.k.shape[1]
    body = _tensor(heads, count, dtype) if tensor else _vector(heads, count, keys)
    kernel, threads, tiles, shape = body
    splits = _splits(cut, rows, count, window)
    return Plan(heads, count, kernel, threads, tiles, splits, sizes, shape | {"TAIL": tail})


def combine(
    parts: mx.array,
    rows: StepRows,
    step: Plan,
    sinks: mx.array | None,
    gate: mx.array | None,
    dtype: mx.Dtype,
    *,
    target: GpuTarget,
) -> mx.array:
    """The second pass: [T, Hq * D] of what the first one left."""
    T, heads = step.rows, step.heads
    Hq, D, lanes = heads.num_heads, heads.head_dim, geometry.combine_lanes(heads.head_dim)
    (y,) = COMBINE(
        target,
        [
            parts,
            rows.lengths,
            rows.lengths if sinks is None else sinks,
            parts if gate is None else gate,
        ],
        template={
            **step.sizes,
            "T": dtype,
            "LANES": lanes,
            "THREADS": geometry.COMBINE_THREADS,
            "HAS_SINKS": sinks is not None,
            "HAS_GATE": gate is not None,
            "GATE_STEP": gate_step(gate, T, heads),
        },
        grid=(geometry.COMBINE_THREADS, T * Hq, D // (4 * lanes)),
        threadgroup=(geometry.COMBINE_THREADS, 1, 1),
        outputs=[((T, Hq * D), dtype)],
    )
    return y


def gate_step(gate: mx.array | None, count: int, heads: HeadGeometry) -> int:
    """How far the gates of two heads lie apart in a row; 1 where each is one number.

    Raises:
        ShapeError: these are no gates of `count` rows of the heads.
    """
    Hq, D = heads.num_heads, heads.head_dim
    if gate is None or gate.shape == (count, Hq * D):
        return D
    if gate.shape == (count, Hq):
        return 1
    if gate.ndim != 3 or gate.shape[:2] != (count, Hq) or gate.shape[2] < D:
        raise ShapeError(f"{count} rows of {Hq} heads of {D} do not take gates {gate.shape}")
    return gate.shape[2]


def takes(heads: HeadGeometry) -> bool:
    """Whether `attention_decode` has a body for this geometry."""
    return geometry.has_vector_shape(heads.head_dim)


def _vector(heads: HeadGeometry, count: int, keys: mx.Dtype) -> tuple[Kernel, int, int, Sizes]:
    """The body that every target has: threads, tiles of queries, template."""
    shape = geometry.vector_shape(heads, count)
    sizes: Sizes = {
        "KV": keys,
        "QUERIES": shape.queries,
        "LANES": shape.lanes,
        "QUADS": shape.quads,
        "BATCH": min(shape.lanes, 4),
        "SIMDGROUPS": geometry.SIMDGROUPS,
    }
    tiles = -(-count * heads.num_heads // (heads.num_kv_heads * shape.queries))
    return PARTIALS, 32 * geometry.SIMDGROUPS, tiles, sizes


def _tensor(heads: HeadGeometry, count: int, dtype: mx.Dtype) -> tuple[Kernel, int, int, Sizes]:
    """The same on tensor cores."""
    shape = geometry.tensor_shape(heads, count)
    sizes: Sizes = {
        "T": dtype,
        "DIMS": shape.dims,
        "WARPS": shape.warps,
        "KEY_TILES": shape.key_tiles,
        "QUERY_TILES": shape.query_tiles,
        "IS_AHEAD": geometry.loads_ahead(heads, count),
    }
    queries = count * heads.num_heads // heads.num_kv_heads
    threads, tiles = 32 * shape.warps, -(-queries // (16 * shape.query_tiles))
    kernel = bounded(TENSOR, threads, geometry.resident_blocks(heads, count))
    return kernel, threads, tiles, sizes


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
    check_sinks(sinks, heads)
    return heads


def check_sinks(sinks: mx.array | None, heads: HeadGeometry) -> None:
    """Refuse what is not one score a head.

    Raises:
        ShapeError: so it is.
    """
    if sinks is not None and sinks.shape != (heads.num_heads,):
        raise ShapeError(f"attention_decode takes sinks {(heads.num_heads,)}, not {sinks.shape}")


def _splits(cut: geometry.Chunks, rows: StepRows, count: int, window: int | None) -> int:
    tail = rows.tail.k.shape[1]
    if rows.sealed is rows.tail:  # every position lies in the tail
        return min(cut.count(tail, count, window), cut.count(tail, count, None))
    return cut.count(rows.sealed.k.shape[1] + tail, count, window)

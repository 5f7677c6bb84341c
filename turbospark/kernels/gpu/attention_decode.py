"""Attention of up to eight query rows over a cache, in two passes split over the keys.

Its reference is `attend_reference` of kernels/attention.py.
"""

from collections.abc import Sequence

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.attention import attend_reference, first_key
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant, current_target
from turbospark.kernels.kv_rows import KVRows, RowBlock
from turbospark.kernels.target import HeadGeometry

PARTIALS = Kernel(
    "attention_partials",
    ("q", "sealed_k", "sealed_v", "tail_k", "tail_v", "lengths", "scale"),
    ("partials", "tops", "totals"),
)
COMBINE = Kernel("attention_combine", ("partials", "tops", "totals", "lengths", "sinks"), ("y",))
MAX_ROWS = 8
CHUNK = 128  # keys of one threadgroup; a constant, so that a row's sums never change with length
THREADS = 128

Sizes = dict[str, mx.Dtype | int | bool]

_MAX_QUERIES = 16  # of one threadgroup, bounded by registers
_QUERY_VALUES = 4096  # of one threadgroup, bounded by its memory


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
    heads = _check(q, rows, sinks)
    target = target or current_target()
    if target is None:
        return attend_reference(q, rows, scale, window, sinks)
    T, Hq, D = q.shape
    begin = first_key(rows, T, window)
    splits = -(-rows.end // CHUNK) - begin // CHUNK
    sealed, tail = _blocks(rows)
    lengths = mx.array(
        [begin, rows.boundary, rows.end, sealed.capacity, tail.capacity, splits], mx.int32
    )
    sizes: Sizes = {
        "T": q.dtype,
        "M": T,
        "D": D,
        "HEADS": Hq,
        "CHUNK": CHUNK,
        "THREADS": THREADS,
        "KEY_GROUPS": THREADS * 4 // D,
    }
    inputs = [q, sealed.k, sealed.v, tail.k, tail.v, lengths, constant(scale)]
    partials = _partials(target, inputs, heads, splits, {**sizes, "WINDOW": window or 0})
    (y,) = COMBINE(
        target,
        [*partials, lengths, lengths if sinks is None else sinks],
        template={**sizes, "HAS_SINKS": sinks is not None},
        grid=(THREADS, T * Hq, 1),
        threadgroup=(THREADS, 1, 1),
        outputs=[((T, Hq * D), q.dtype)],
    )
    return y


def _partials(
    target: GpuTarget,
    inputs: Sequence[mx.array],
    heads: HeadGeometry,
    splits: int,
    sizes: Sizes,
) -> list[mx.array]:
    """The first pass: weighted values [splits, T, Hq, D], largest scores, sums of weights."""
    T, Hq, D = inputs[0].shape
    share = Hq // heads.num_kv_heads
    queries = min(T * share, _MAX_QUERIES, _QUERY_VALUES // D)
    tiles = -(-T * share // queries)
    return PARTIALS(
        target,
        inputs,
        template={
            **sizes,
            "KV": inputs[1].dtype,
            "SHARE": share,
            "QUERIES": queries,
            "TILES": tiles,
        },
        grid=(THREADS, heads.num_kv_heads * tiles, splits),
        threadgroup=(THREADS, 1, 1),
        outputs=[
            ((splits, T, Hq, D), mx.float32),
            ((splits, T, Hq), mx.float32),
            ((splits, T, Hq), mx.float32),
        ],
    )


def takes(heads: HeadGeometry) -> bool:
    """Whether `attention_decode` has a body for this geometry."""
    return heads.head_dim % 8 == 0 and 8 <= heads.head_dim <= 4 * THREADS


def _check(q: mx.array, rows: KVRows, sinks: mx.array | None) -> HeadGeometry:
    if q.ndim != 3 or not 1 <= q.shape[0] <= min(MAX_ROWS, rows.end):
        raise ShapeError(
            f"attention_decode takes 1 to {MAX_ROWS} query rows [T, Hq, D] whose keys are in the "
            f"cache, not q {q.shape} over {rows.end} rows"
        )
    _, Hq, D = q.shape
    keys = _blocks(rows)[0].k
    Hkv, _, kv_dim = keys.shape
    heads = HeadGeometry(Hq, Hkv, D)
    if kv_dim != D or Hq % Hkv or not takes(heads):
        raise ShapeError(
            f"attention_decode takes head dimensions that are a multiple of 8 up to "
            f"{4 * THREADS}, the same in q {q.shape} and keys {keys.shape}"
        )
    if sinks is not None and sinks.shape != (Hq,):
        raise ShapeError(f"attention_decode takes sinks {(Hq,)}, not {sinks.shape}")
    return heads


def _blocks(rows: KVRows) -> tuple[RowBlock, RowBlock]:
    """Sealed rows and tail; one stands in for the other where no position lies in it."""
    sealed, tail = rows.sealed or rows.tail, rows.tail or rows.sealed
    if sealed is None or tail is None:
        raise ShapeError("attention_decode over a cache without rows")
    return sealed, tail

"""Attention of many query rows over a cache, by MLX's own fused operation."""

import mlx.core as mx

from turbospark.kernels.attention import first_key
from turbospark.kernels.kv_rows import KVRows

FUSED_HEAD_DIM = 128
"""Wider heads, and masks, may make MLX write all scores to memory."""
SCORES = 1 << 26
"""Scores in memory at a time; the queries are fed in blocks that keep to it."""


def attention_prefill(
    q: mx.array,
    rows: KVRows,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q k^T scale) v, where a query sees itself and what came before it.

    Args:
        q: [T, Hq, D]; row i stands at position rows.end - T + i, its own key is in `rows`.
        rows: the cache's keys and values, the latter of any width V; Hkv divides Hq.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: [Hq] scores that join each head's softmax and add no value.

    Returns:
        [T, Hq * V] in the dtype of `q`.

    Raises:
        ShapeError: the cache no longer holds a row that a query must see.
    """
    T, Hq, D = q.shape
    begin = first_key(rows, T, window)
    k, v = (positions(rows, name, begin).astype(q.dtype) for name in ("k", "v"))  # [Hkv, n, D]
    sinks = None if sinks is None else sinks.astype(q.dtype)
    block = T
    if D > FUSED_HEAD_DIM or window is not None:
        block = max(16, SCORES // (Hq * k.shape[1]))
    parts: list[mx.array] = []
    for row in range(0, T, block):
        count, position = min(block, T - row), rows.end - T + row
        low = begin if window is None else max(begin, position + 1 - window)
        seen = slice(low - begin, position + count - begin)
        out = mx.fast.scaled_dot_product_attention(
            q[row : row + count].swapaxes(0, 1)[None],
            k[None, :, seen],
            v[None, :, seen],
            scale=scale,
            mask="causal" if window is None else _window_mask(count, low, position, window),
            sinks=sinks,
        )  # [1, Hq, count, V]
        parts.append(mx.reshape(out[0].swapaxes(0, 1), (count, -1)))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _window_mask(count: int, low: int, position: int, window: int) -> mx.array:
    """Which keys from `low` on the queries from `position` on see: [count, n]."""
    end = position + count
    keys, queries = mx.arange(low, end), mx.arange(position, end)[:, None]
    return (keys <= queries) & (keys > queries - window)


def positions(rows: KVRows, name: str, begin: int) -> mx.array:
    """Rows of positions [begin, end) in order, from the sealed block and the tail."""
    parts: list[mx.array] = []
    position = begin
    while rows.sealed is not None and position < rows.boundary:
        block: mx.array = getattr(rows.sealed, name)
        slot = position % rows.sealed.capacity
        count = min(rows.boundary - position, rows.sealed.capacity - slot)
        parts.append(block[:, slot : slot + count])
        position += count
    if rows.tail is not None and position < rows.end:
        tail: mx.array = getattr(rows.tail, name)
        parts.append(tail[:, position - rows.boundary : rows.end - rows.boundary])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

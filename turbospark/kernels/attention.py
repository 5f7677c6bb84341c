"""Causal attention of a few query rows over a cache: grouped heads, windows, sinks."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.kv_rows import KVRows, RowBlock, StepRows

KEY_BLOCK = 64


def attend_reference(
    q: mx.array,
    rows: KVRows,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q k^T scale) v, where a query sees itself and what came before it.

    The sums run over whole blocks of KEY_BLOCK keys, aligned to absolute positions, with zeros
    for keys that a query does not see: so a row's result does not depend on its neighbours, bit
    for bit on a CPU.

    Args:
        q: [T, Hq, D]; row i stands at position rows.end - T + i, its own key is in `rows`.
        rows: the cache's keys and values; Hkv divides Hq, query head h reads head h * Hkv // Hq.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: [Hq] scores that join each head's softmax and add no value.

    Returns:
        [T, Hq * D] in the dtype of `q`, computed in float32.

    Raises:
        ShapeError: the cache no longer holds a row that a query must see.
    """
    T, _, D = q.shape
    begin, end = first_key(rows, T, window), rows.end
    start, padded = begin // KEY_BLOCK * KEY_BLOCK, -(-end // KEY_BLOCK) * KEY_BLOCK
    k, v = (_gather(rows, name, begin, start, padded) for name in ("k", "v"))  # [Hkv, n, D]
    Hkv = k.shape[0]
    grouped = mx.reshape(q.astype(mx.float32), (T, Hkv, -1, D))
    grouped = mx.transpose(grouped, (1, 2, 0, 3))  # [Hkv, G, T, D]
    scores = (grouped @ k[:, None].swapaxes(-1, -2)) * scale  # [Hkv, G, T, n]
    keys, queries = mx.arange(start, padded), mx.arange(end - T, end)[:, None]
    seen = keys <= queries
    if window is not None:
        seen = seen & (keys > queries - window)
    scores = mx.where(seen, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else mx.reshape(sinks.astype(mx.float32), (Hkv, -1, 1, 1))
    if sink is not None:
        top = mx.maximum(top, sink)
    weights = mx.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + mx.exp(sink - top)
    out = (weights @ v[:, None]) / total  # [Hkv, G, T, D]
    return mx.reshape(mx.transpose(out, (2, 0, 1, 3)), (T, -1)).astype(q.dtype)


def attend_step_reference(
    q: mx.array,
    rows: StepRows,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The same over all memory of a cache, where positions are arrays: masks say what is seen.

    Args:
        q: [T, Hq, D]; row i stands at position rows.lengths[1] + i, its own key is in `rows`.
        rows: what a compiled step reads.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: [Hq] scores that join each head's softmax and add no value.

    Returns:
        [T, Hq * D] in the dtype of `q`, computed in float32.
    """
    T, _, D = q.shape
    boundary, start = rows.lengths[0], rows.lengths[1]
    keys = boundary + mx.arange(rows.tail.capacity)
    blocks = [rows.tail]
    if rows.sealed is not rows.tail:
        slots, capacity = mx.arange(rows.sealed.capacity), rows.sealed.capacity
        # The newest position below the boundary that lies in each slot; below 0 where none does.
        newest = boundary - 1 - (boundary - 1 - slots) % capacity
        keys, blocks = mx.concatenate([newest, keys]), [rows.sealed, rows.tail]
    k = mx.concatenate([block.k for block in blocks], axis=1).astype(mx.float32)
    v = mx.concatenate([block.v for block in blocks], axis=1).astype(mx.float32)
    queries = (start + mx.arange(T))[:, None]
    seen = (keys >= 0) & (keys <= queries)
    if window is not None:
        seen = seen & (keys > queries - window)
    # What lies in memory that no position names may be anything, NaN included.
    v = mx.where(seen.any(axis=0)[None, :, None], v, 0.0)
    grouped = mx.reshape(q.astype(mx.float32), (T, k.shape[0], -1, D))
    grouped = mx.transpose(grouped, (1, 2, 0, 3))  # [Hkv, G, T, D]
    scores = mx.where(seen, (grouped @ k[:, None].swapaxes(-1, -2)) * scale, -mx.inf)
    if sinks is not None:
        column = mx.reshape(sinks.astype(mx.float32), (k.shape[0], -1, 1, 1))
        column = mx.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : v.shape[1]]
    out = weights @ v[:, None]
    return mx.reshape(mx.transpose(out, (2, 0, 1, 3)), (T, -1)).astype(q.dtype)


def gated_reference(attended: mx.array, gate: mx.array) -> mx.array:
    """Multiply by sigmoid(gate), where a gate is of one number or of a head.

    Args:
        attended: [T, Hq * D].
        gate: [T, Hq * D], or [T, Hq] whose sigmoid is computed in float32.

    Returns:
        [T, Hq * D] in the dtype of `attended`.
    """
    if gate.shape == attended.shape:
        return attended * mx.sigmoid(gate)
    opening = mx.sigmoid(gate.astype(mx.float32)).astype(attended.dtype)
    heads = mx.reshape(attended, (*gate.shape, -1))  # [T, Hq, D]
    return mx.reshape(heads * opening[..., None], attended.shape)


def first_key(rows: KVRows, count: int, window: int | None) -> int:
    """The oldest position that the newest `count` queries see.

    Raises:
        ShapeError: the cache does not hold it any more, or not yet the queries' own rows.
    """
    if count > rows.end:
        raise ShapeError(f"{count} queries over a cache of {rows.end} rows: append theirs first")
    begin = 0 if window is None else max(0, rows.end - count - window + 1)
    if begin < rows.first:
        raise ShapeError(
            f"{count} queries at position {rows.end - count} with window {window} need the row of "
            f"position {begin}, but the cache holds none before {rows.first}"
        )
    return begin


def _gather(rows: KVRows, name: str, begin: int, start: int, padded: int) -> mx.array:
    """Rows of positions [start, padded) in order, zeros where none is seen; float32."""
    parts: list[mx.array] = []
    if rows.sealed is not None:
        parts.extend(_sealed_parts(rows.sealed, name, begin, rows.boundary))
    if rows.tail is not None and rows.end > rows.boundary:
        tail: mx.array = getattr(rows.tail, name)
        skipped = max(0, begin - rows.boundary)
        parts.append(tail[:, skipped : rows.end - rows.boundary])
    shape = parts[0].shape
    before = mx.zeros((shape[0], begin - start, shape[2]))
    after = mx.zeros((shape[0], padded - rows.end, shape[2]))
    return mx.concatenate([before, *(part.astype(mx.float32) for part in parts), after], axis=1)


def _sealed_parts(sealed: RowBlock, name: str, begin: int, upto: int) -> list[mx.array]:
    block: mx.array = getattr(sealed, name)
    parts: list[mx.array] = []
    while begin < upto:
        slot = begin % sealed.capacity
        count = min(upto - begin, sealed.capacity - slot)
        parts.append(block[:, slot : slot + count])
        begin += count
    return parts

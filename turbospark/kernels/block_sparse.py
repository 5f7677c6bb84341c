"""Attention to chosen blocks of keys: an index of pooled keys says which ones a query reads.

Source: transformers 5.24, models/qwen4_exp. Complete blocks of `ratio` rows are ranked by the sum
over index heads of relu(q . k); the best ones are read, and the rows behind the last complete
block always. Equal scores are common, since relu gives zeros: the earlier block ranks first.
"""

from dataclasses import dataclass

import mlx.core as mx

from turbospark.kernels.kv_rows import KVRows, StepRows
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import Rope, rope_reference
from turbospark.kernels.weights import Norm

_GATHERED = 32
"""Query rows whose keys and values are gathered at once."""


@dataclass(frozen=True, slots=True)
class IndexGeometry:
    """Sizes of an index.

    Attributes:
        num_heads: index queries of a row.
        head_dim: of them and of the one index key of a row.
        budget: rows of complete blocks that a query reads at most.
        ratio: rows of a block.
    """

    num_heads: int
    head_dim: int
    budget: int
    ratio: int

    @property
    def blocks(self) -> int:
        """Blocks that a query reads."""
        return self.budget // self.ratio

    @property
    def dense_rows(self) -> int:
        """Up to so many rows a query reads all of them."""
        return self.budget + self.ratio - 1


def rows_at(rows: KVRows | StepRows, name: str, positions: mx.array) -> mx.array:
    """Keys or values of some positions of a cache that forgets none.

    Args:
        rows: the cache's.
        name: "k" or "v".
        positions: int32; what those outside the cache give means nothing.

    Returns:
        [Hkv, *positions.shape, D].
    """
    if isinstance(rows, StepRows):
        boundary, tail = rows.lengths[0], rows.tail
        sealed = None if rows.sealed is rows.tail else rows.sealed
    else:
        boundary, tail, sealed = mx.array(rows.boundary, mx.int32), rows.tail, rows.sealed
    parts: list[mx.array] = []
    for block, first in ((sealed, 0), (tail, boundary)):
        if block is not None:
            places = mx.clip(positions - first, 0, block.capacity - 1)
            parts.append(mx.take(getattr(block, name), places, axis=1))
    if len(parts) == 1:
        return parts[0]
    return mx.where((positions < boundary)[..., None], *parts)


def pooled_keys_reference(
    raw: mx.array, before: mx.array, norm: Norm, rope: Rope, start: int | mx.array
) -> mx.array:
    """The index keys of the blocks that T rows complete.

    Args:
        raw: [T, D], the rows' own.
        before: [ratio - 1, D], those of the rows before them; any where there are none.
        norm: of a block's mean.
        rope: of index heads; a block stands where its first row does.
        start: position of the first of the T rows.

    Returns:
        [T, D] in the dtype of `raw`: a block's key at its last row, zeros at the others.
    """
    T, ratio = raw.shape[0], before.shape[0] + 1
    window = mx.concatenate([before.astype(mx.float32), raw.astype(mx.float32)])
    total = window[:T]
    for place in range(1, ratio):
        total = total + window[place : place + T]
    pooled = rms_norm_reference((total / ratio).astype(raw.dtype), norm)
    turned = rope_reference(pooled[:, None], rope, start - (ratio - 1))[:, 0]
    ends = (start + mx.arange(T)) % ratio == ratio - 1
    return mx.where(ends[:, None], turned, 0).astype(raw.dtype)


def block_scores_reference(q: mx.array, keys: mx.array) -> mx.array:
    """How well blocks fit to queries: q [T, H, D], keys [n, D] -> [T, n] float32, none negative."""
    products = q.astype(mx.float32) @ keys.astype(mx.float32).T  # [T, H, n]
    fits = mx.maximum(products, 0)
    total = fits[:, 0]
    for head in range(1, q.shape[1]):
        total = total + fits[:, head]
    return total * q.shape[-1] ** -0.5


def best_blocks_reference(scores: mx.array, visible: mx.array, count: int) -> mx.array:
    """The blocks with the best scores, of equal ones the earlier.

    Args:
        scores: [T, n], none negative.
        visible: [T] int32; a row may choose among the first so many blocks.
        count: how many it chooses.

    Returns:
        [T, count] int32, ascending; n where there are fewer.
    """
    n = scores.shape[1]
    ids = mx.arange(n, dtype=mx.int32)
    seen = ids < visible[:, None]
    ranked = mx.where(seen, scores, -1.0)
    if n > count:
        least = mx.sort(ranked, axis=-1)[:, n - count :][:, :1]
        above, level = ranked > least, seen & (ranked == least)
        room = count - above.astype(mx.int32).sum(axis=-1, keepdims=True)
        seen = seen & (above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room)))
    chosen = mx.sort(mx.where(seen, ids, n), axis=-1)[:, :count]
    missing = count - chosen.shape[1]
    return mx.pad(chosen, [(0, 0), (0, missing)], constant_values=n) if missing else chosen


def chosen_rows_reference(
    blocks: mx.array, queries: mx.array, ratio: int, absent: int
) -> tuple[mx.array, mx.array]:
    """The positions that queries read: chosen blocks, then the rows of the incomplete one.

    Args:
        blocks: [T, count] int32, ascending.
        queries: [T] int32 positions of the queries.
        ratio: rows of a block.
        absent: the number of no block.

    Returns:
        positions [T, count * ratio + ratio - 1] int32, and which of them count.
    """
    within = mx.arange(ratio, dtype=mx.int32)
    full = mx.reshape(blocks[:, :, None] * ratio + within, (blocks.shape[0], -1))
    real = mx.repeat(blocks < absent, ratio, axis=1)
    first = (queries + 1) // ratio * ratio
    ragged = first[:, None] + within[:-1]
    positions = mx.concatenate([full, ragged], axis=1)
    return positions, mx.concatenate([real, ragged <= queries[:, None]], axis=1)


def attend_at_reference(
    q: mx.array,
    rows: KVRows | StepRows,
    positions: mx.array,
    counts: mx.array,
    scale: float,
) -> mx.array:
    """softmax(q k^T scale) v over rows that every query names.

    Args:
        q: [T, Hq, D].
        rows: of the cache; Hkv divides Hq.
        positions: [T, L] int32.
        counts: [T, L], whether a position counts; one of every row does.
        scale: factor of the scores.

    Returns:
        [T, Hq * D] in the dtype of `q`, computed in float32.
    """
    parts = [
        _attend(q[i : i + _GATHERED], rows, positions[i : i + _GATHERED],
                counts[i : i + _GATHERED], scale)
        for i in range(0, q.shape[0], _GATHERED)
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend(
    q: mx.array, rows: KVRows | StepRows, positions: mx.array, counts: mx.array, scale: float
) -> mx.array:
    T, _, D = q.shape
    k = rows_at(rows, "k", positions).astype(mx.float32)  # [Hkv, T, L, D]
    v = mx.where(counts[..., None], rows_at(rows, "v", positions).astype(mx.float32), 0.0)
    Hkv = k.shape[0]
    grouped = mx.reshape(q.astype(mx.float32), (T, Hkv, -1, D)).swapaxes(0, 1)  # [Hkv, T, G, D]
    scores = (grouped @ k.swapaxes(-1, -2)) * scale
    weights = mx.softmax(mx.where(counts[:, None], scores, -mx.inf), axis=-1)
    out = (weights @ v).swapaxes(0, 1)  # [T, Hkv, G, D]
    return mx.reshape(out, (T, -1)).astype(q.dtype)

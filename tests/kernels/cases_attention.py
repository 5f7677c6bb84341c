"""One table of attention cases for every body, and the truth in double precision."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark.caches.base import RowCache
from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.kernels.kv_rows import KVRows, RowBlock
from turbospark.kernels.target import HeadGeometry


@dataclass(frozen=True)
class AttentionCase:
    """A sequence of `tokens`, each attending to what it may see."""

    name: str
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    slack: int | None = None  # of a ring; None for a full cache
    sinks: bool = False

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.q_heads, self.kv_heads, self.head_dim)

    @property
    def scale(self) -> float:
        return 1.3 * self.head_dim**-0.5

    def cache(self) -> RowCache:
        if self.slack is None:
            return KVCache(self.kv_heads, self.head_dim, self.tokens)
        assert self.window is not None
        return RingCache(self.kv_heads, self.head_dim, self.tokens, self.window, self.slack)


CASES = [
    AttentionCase("one token", 1, 3, 3, 24),
    AttentionCase("grouped heads", 150, 6, 2, 40),
    AttentionCase("one key head", 301, 5, 1, 72),
    AttentionCase("odd head", 70, 7, 7, 19),
    AttentionCase("head smaller than a vector", 33, 2, 1, 3),
    AttentionCase("wide head", 140, 4, 1, 256),
    AttentionCase("widest head", 67, 3, 1, 512),
    AttentionCase("window of one", 23, 3, 1, 24, window=1),
    AttentionCase("window one longer than the text", 36, 3, 1, 24, window=37),
    AttentionCase("window as long as the text", 37, 3, 1, 24, window=37),
    AttentionCase("window one shorter than the text", 38, 3, 1, 24, window=37),
    AttentionCase("window in a full cache", 301, 6, 2, 24, window=129),
    AttentionCase("ring", 301, 6, 2, 24, window=37, slack=7),
    AttentionCase("ring without slack", 301, 3, 1, 32, window=64, slack=0),
    AttentionCase("sinks", 131, 6, 3, 24, sinks=True),
    AttentionCase("ring and sinks", 301, 5, 1, 40, window=130, slack=30, sinks=True),
]


@dataclass(frozen=True)
class Inputs:
    """q [T, Hq, D], k and v [T, Hkv, D], sinks [Hq] or None."""

    q: mx.array
    k: mx.array
    v: mx.array
    sinks: mx.array | None


def inputs(case: AttentionCase, seed: int = 11) -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    T, D = case.tokens, case.head_dim
    sinks = normal(case.q_heads) if case.sinks else None
    rows = (normal(T, heads, D) for heads in (case.q_heads, case.kv_heads, case.kv_heads))
    return Inputs(*rows, sinks)


def in_double(case: AttentionCase, given: Inputs) -> np.ndarray:
    """[T, Hq * D]: every query by itself over the keys it sees, in float64."""
    q, k, v = (np.array(part).astype(np.float64) for part in (given.q, given.k, given.v))
    out = np.zeros_like(q)
    for t in range(case.tokens):
        first = 0 if case.window is None else max(0, t - case.window + 1)
        for h in range(case.q_heads):
            shared = h * case.kv_heads // case.q_heads
            scores = k[first : t + 1, shared] @ q[t, h] * case.scale
            extra = [] if given.sinks is None else [float(given.sinks[h])]
            weights = np.exp(np.concatenate([scores, extra]) - scores.max())
            out[t, h] = weights[: len(scores)] @ v[first : t + 1, shared] / weights.sum()
    return out.reshape(case.tokens, -1)


def laid_out(
    given: Inputs, boundary: int, capacity: int, tail_capacity: int, first: int = 0
) -> KVRows:
    """The rows of `given` in two blocks; all other memory is NaN."""
    T, heads, D = given.k.shape
    parts = []
    for rows in (np.array(given.k), np.array(given.v)):
        sealed = np.full((heads, max(1, capacity), D), np.nan, np.float32)
        tail = np.full((heads, tail_capacity, D), np.nan, np.float32)
        for position in range(first, T):
            if position < boundary:
                sealed[:, position % capacity] = rows[position]
            else:
                tail[:, position - boundary] = rows[position]
        parts.append((mx.array(sealed), mx.array(tail)))
    (sealed_k, tail_k), (sealed_v, tail_v) = parts
    sealed_block = RowBlock(sealed_k, sealed_v) if boundary else None
    return KVRows(sealed_block, RowBlock(tail_k, tail_v), first, boundary, T)


class Fixed:
    """A cache that holds what it was given."""

    def __init__(self, rows: KVRows) -> None:
        self._rows = rows

    @property
    def offset(self) -> int:
        return self._rows.end

    def rows(self) -> KVRows:
        return self._rows

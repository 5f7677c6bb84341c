"""Attention that reads chosen blocks of rows once there are more than it has a budget for.

Beside its keys and values a layer keeps one index row a position: the raw index key, and the
pooled key of the block that ends there (zeros elsewhere). Neither changes once it is written, so
the index is rewound, forked and saved as any cache of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx

from turbospark.kernels.attention import attend_reference, gated_reference
from turbospark.kernels.block_sparse import (
    IndexGeometry,
    attend_at_reference,
    best_blocks_reference,
    block_scores_reference,
    chosen_rows_reference,
    pooled_keys_reference,
    rows_at,
)
from turbospark.kernels.device import on_cpu
from turbospark.kernels.kv_rows import KVRows, RowBlock, RowStore, StepRows
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import AppendIndex, AttendChosen, HeadGeometry, KernelSet
from turbospark.nn.attention import HeadNormRope, RotatedAttention
from turbospark.nn.linear import RMSNorm
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase


class SparseInputs(NamedTuple):
    """Projections of T rows.

    Attributes:
        q: [T, Hq * D].
        gate: [T, Hq * D], whose sigmoid multiplies the result.
        k: [T, Hkv * D].
        v: [T, Hkv * D].
        index_q: [T, Hi * Di].
        index_k: [T, Di].
    """

    q: mx.array
    gate: mx.array
    k: mx.array
    v: mx.array
    index_q: mx.array
    index_k: mx.array

    def cut(self, start: int, end: int) -> "SparseInputs":
        """Rows start .. end - 1."""
        return SparseInputs(*(part[start:end] for part in self))


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """The caches of a layer: its keys and values, and its index. They advance together."""

    rows: RowStore
    index: RowStore


class ChosenRows(NamedTuple):
    """What queries read.

    Attributes:
        positions: [T, budget + ratio - 1] int32.
        counts: [T, budget + ratio - 1], which of the positions count.
    """

    positions: mx.array
    counts: mx.array


class BlockIndex(Unit):
    """The index of a layer: its rows, and the choice of blocks by them.

    Args:
        index: sizes.
        rope: of index heads.
        q_norm: of index queries.
        k_norm: of blocks' keys.
    """

    def __init__(self, index: IndexGeometry, rope: Rope, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        self._index, self._rope, self._k_norm = index, rope, k_norm
        heads = HeadGeometry(index.num_heads, 1, index.head_dim)
        self._rotate = HeadNormRope(heads, rope, q_norm=q_norm)

        self._write: AppendIndex | None = None

    def bind(self, kernels: KernelSet) -> None:
        self._rotate.bind(kernels)
        self._write = kernels.append_index(self._index, self._k_norm.value, self._rope)
        self.body = self._rotate.body

    def append(self, raw: mx.array, cache: RowStore) -> None:
        """Write the index keys [T, Di] of T rows, and the keys of the blocks that they complete."""
        if self._write is not None and self._write(raw, cache):
            return
        start, ratio = cast("int | mx.array", cache.offset), self._index.ratio
        rows = cast("KVRows | StepRows", cache.rows())
        if isinstance(rows, KVRows) and rows.end == 0:
            before = mx.zeros((ratio - 1, raw.shape[1]), raw.dtype)
        else:
            positions = (start - (ratio - 1)) + mx.arange(ratio - 1, dtype=mx.int32)
            before = rows_at(rows, "k", positions)[0]
        pooled = pooled_keys_reference(raw, before, self._k_norm.value, self._rope, start)
        cache.append(raw[:, None].astype(pooled.dtype), pooled[:, None])

    def choose(self, index_q: mx.array, cache: RowStore, phase: Phase) -> ChosenRows:
        """What the newest T rows read, whose index keys are in the cache; [T, Hi * Di]."""
        T, ratio = index_q.shape[0], self._index.ratio
        q = self._rotate(index_q, None, None, cache, phase)
        rows = cast("KVRows | StepRows", cache.rows())
        queries = cast("int | mx.array", cache.offset) - T + mx.arange(T, dtype=mx.int32)
        n = _blocks(rows, ratio)
        ends = mx.arange(n, dtype=mx.int32) * ratio + (ratio - 1)
        scores = block_scores_reference(q, rows_at(rows, "v", ends)[0])
        blocks = best_blocks_reference(scores, (queries + 1) // ratio, self._index.blocks)
        return ChosenRows(*chosen_rows_reference(blocks, queries, ratio, n))


class BlockSparseAttention(Unit):
    """Head norms, RoPE, cache rows, attention to chosen blocks of them, and the gate.

    Args:
        heads: of the layer.
        rope: of its heads.
        index: sizes of its index.
        index_rope: of index heads.
        q_norm: of its queries.
        k_norm: of its keys.
        index_q_norm: of index queries.
        index_k_norm: of blocks' keys.
    """

    def __init__(
        self,
        heads: HeadGeometry,
        rope: Rope,
        index: IndexGeometry,
        index_rope: Rope,
        *,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        index_q_norm: RMSNorm,
        index_k_norm: RMSNorm,
    ) -> None:
        self._geometry, self._scale = index, heads.head_dim**-0.5
        self._index = BlockIndex(index, index_rope, index_q_norm, index_k_norm)
        self._dense = RotatedAttention(heads, rope, scale=self._scale, q_norm=q_norm, k_norm=k_norm)

        self._run: AttendChosen | None = None
        self._heads = heads

    def bind(self, kernels: KernelSet) -> None:
        for unit in (self._index, self._dense):
            unit.bind(kernels)
        self._run = kernels.attend_chosen(self._heads, self._scale)
        self.body = self._dense.body

    def __call__(self, inputs: SparseInputs, caches: IndexedRows, phase: Phase) -> mx.array:
        """Attend from T rows: [T, Hq * D]; both caches advance by T."""
        T = inputs.q.shape[0]
        dense = min(T, self._dense_rows(caches))
        parts: list[mx.array] = []
        if dense:
            first = inputs.cut(0, dense) if dense < T else inputs
            self._index.append(first.index_k, caches.index)
            q, k, v = first.q, first.k, first.v
            parts.append(self._dense(q, k, v, caches.rows, phase, first.gate))
        if dense < T:
            rest = inputs.cut(dense, T) if dense else inputs
            parts.append(self._attend_chosen(rest, caches, phase))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def append(self, inputs: SparseInputs, caches: IndexedRows, phase: Phase) -> mx.array:
        """Write the rows of both caches and rotate the queries: [T, Hq, D]."""
        self._index.append(inputs.index_k, caches.index)
        return self._dense.rotate(inputs.q, inputs.k, inputs.v, caches.rows, phase)

    def _dense_rows(self, caches: IndexedRows) -> int:
        """How many of the next rows read all that is there.

        Inside a compiled step their position is not known: then all of them or none, by the
        memory that there is for rows. Choosing from few rows chooses them all.
        """
        rows = cast("KVRows | StepRows", caches.rows.rows())
        if not isinstance(rows, StepRows):
            return max(0, self._geometry.dense_rows - rows.end)
        capacity = rows.tail.capacity
        if rows.sealed is not rows.tail:
            capacity += rows.sealed.capacity
        return capacity if capacity <= self._geometry.dense_rows else 0

    def _attend_chosen(self, inputs: SparseInputs, caches: IndexedRows, phase: Phase) -> mx.array:
        start = cast("int | mx.array", caches.rows.offset)
        q = self.append(inputs, caches, phase)
        chosen = self._index.choose(inputs.index_q, caches.index, phase)
        rows = cast("KVRows | StepRows", caches.rows.rows())
        if isinstance(start, int) and on_cpu():
            ends = range(start + 1, start + 1 + q.shape[0])
            lengths = [self._geometry.budget + end % self._geometry.ratio for end in ends]
            attended = (self._run or self._row_by_row)(q, rows, chosen.positions, lengths)
        else:
            attended = attend_at_reference(q, rows, *chosen, self._scale)
        return gated_reference(attended, inputs.gate)

    def _row_by_row(
        self, q: mx.array, rows: Any, positions: mx.array, lengths: Sequence[int]
    ) -> mx.array:
        """Each query over a gathered cache of its own, so that it does not depend on others."""
        made: list[mx.array] = []
        for row, length in enumerate(lengths):
            k, v = (rows_at(rows, name, positions[row, :length]) for name in "kv")
            gathered = KVRows(None, RowBlock(k, v), 0, 0, length)
            made.append(attend_reference(q[row : row + 1], gathered, self._scale))
        return made[0] if len(made) == 1 else mx.concatenate(made)


def _blocks(rows: KVRows | StepRows, ratio: int) -> int:
    """Complete blocks that there are, or that there is memory for."""
    if isinstance(rows, KVRows):
        return rows.end // ratio
    capacity = rows.tail.capacity
    return (capacity if rows.sealed is rows.tail else capacity + rows.sealed.capacity) // ratio

"""What full and ring caches share: sealed rows, a private tail, exact rewinds.

A step reads the sealed rows and replaces the tail only, because writing into a buffer that a
running step still holds copies all of it. A tail that has no room for the next rows is sealed:
its rows move behind the sealed ones, and a new tail begins. A chunk longer than a tail becomes
the tail as it is, so that a ring drops no row before every query of the chunk has seen it.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import mlx.core as mx

from turbospark.caches.exported import check_exported
from turbospark.errors import ContextLengthError, RewindError, ShapeError
from turbospark.kernels.kv_rows import KVRows, RowBlock, newest_rows

TAIL_ROWS = 128


class RowCache(ABC):
    """Key and value rows of one attention layer, at absolute positions.

    The sealed rows hold position p in row p % capacity; capacity doubles up to `limit`, and only
    then can a position meet an older one.
    """

    recurrent = False
    """Whether only a kept state leads back to an earlier position."""
    reach = 0
    """Tokens that a query sees, its own included; 0 is all of them."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        max_context: int,
        limit: int,
        value_dim: int | None = None,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.max_context = max_context
        self._limit = limit
        self._sealed: RowBlock | None = None
        self._tail: RowBlock | None = None
        self._tail_is_private = False
        self._first = 0
        self._boundary = 0
        self._offset = 0
        self._furthest = 0

    @property
    def offset(self) -> int:
        """Tokens written so far; also the position of the next one."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes allocated now; sealed rows that forks share count in each of them."""
        return sum(block.nbytes for block in (self._sealed, self._tail) if block is not None)

    def rows(self) -> KVRows:
        """The rows as they are now. Drop the value before the next append: it holds memory."""
        return KVRows(self._sealed, self._tail, self._first, self._boundary, self._offset)

    def append(self, k: mx.array, v: mx.array) -> None:
        """Add rows at `offset` and advance by T.

        Args:
            k: [T, Hkv, D], normed and rotated.
            v: [T, Hkv, D], or as wide as `value_dim` says.

        Raises:
            ShapeError: k or v has another shape; nothing was written.
            ContextLengthError: offset + T exceeds max_context; nothing was written.
        """
        count = k.shape[0]
        for rows, dims in ((k, self.head_dim), (v, self.value_dim)):
            if rows.shape != (count, self.num_kv_heads, dims):
                raise ShapeError(
                    f"rows {rows.shape} given where {(count, self.num_kv_heads, dims)} are needed"
                )
        self._check_room(count)
        k, v = (mx.contiguous(rows.swapaxes(0, 1)) for rows in (k, v))  # [Hkv, T, D]
        if not self._fits(count):
            self._seal()
        if self._tail is None and count >= TAIL_ROWS:
            self._tail, self._tail_is_private = RowBlock(k, v), False
        else:
            tail = self._tail or self._new_block(TAIL_ROWS, k.dtype)
            at = self._offset - self._boundary
            self._tail = RowBlock(_written(tail.k, k, at), _written(tail.v, v, at))
            self._tail_is_private = True
        self.advance(count)

    def reserve(self, count: int) -> tuple[RowBlock, int]:
        """Memory for the next `count` rows, to be written in place by a CPU kernel.

        Whatever read rows that a rewind took back since must have been evaluated.

        Returns:
            A block [Hkv, capacity, D] that no other cache holds, and the row in it of `offset`.
            Call `advance(count)` once the rows are written.

        Raises:
            ContextLengthError: offset + count exceeds max_context; nothing was changed.
        """
        self._check_room(count)
        if not self._fits(count):
            self._seal()
        if self._tail is None:
            self._tail = self._new_block(max(count, TAIL_ROWS), mx.float32)
        elif not self._tail_is_private:
            self._tail = RowBlock(_copied(self._tail.k), _copied(self._tail.v))
        self._tail_is_private = True
        return self._tail, self._offset - self._boundary

    def advance(self, count: int) -> None:
        """Count `count` rows that were written where `reserve` said."""
        self._offset += count
        self._furthest = max(self._furthest, self._offset)

    @property
    def tail_arrays(self) -> list[mx.array]:
        """Keys and values of the tail, if there is one."""
        return [] if self._tail is None else [self._tail.k, self._tail.v]

    def needs_seal(self, count: int) -> bool:
        """Whether `step_blocks(count)` will move the tail's rows behind the sealed ones."""
        tail = self._tail
        return tail is not None and (not self._fits(count) or tail.capacity != TAIL_ROWS)

    def step_blocks(self, count: int) -> tuple[RowBlock, RowBlock, int]:
        """What a compiled step reads and rebinds: sealed rows, tail, position of the tail's start.

        The tail has TAIL_ROWS rows, `count` of them free; where no row is sealed it stands in for
        the sealed ones. Give the new tail back with `take_tail`.

        Raises:
            ContextLengthError: offset + count exceeds max_context; nothing was changed.
            ShapeError: there is no row yet to tell the dtype.
        """
        self._check_room(count)
        if self.needs_seal(count):
            self._seal()
        if self._tail is None:
            if self._sealed is None:
                raise ShapeError(f"{self!r} is empty: a compiled step needs a row before it")
            self._tail = self._new_block(TAIL_ROWS, self._sealed.k.dtype)
        sealed = self._sealed if self._boundary else None
        return sealed or self._tail, self._tail, self._boundary

    def take_tail(self, tail: RowBlock, count: int) -> None:
        """Take the tail that a compiled step has made, with `count` more rows."""
        self._tail, self._tail_is_private = tail, False
        self.advance(count)

    @property
    def rewind_bound(self) -> int | None:
        """How many tokens can be taken back whatever was fed; None is all of them."""
        return None

    @abstractmethod
    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back."""

    @abstractmethod
    def _refusal(self, count: int) -> str:
        """Why `rewind(count)` is not possible."""

    def rewind(self, count: int) -> None:
        """Take back exactly `count` tokens.

        Raises:
            RewindError: more than `max_rewind()` or less than 0; nothing has moved.
        """
        if not 0 <= count <= self.max_rewind():
            why = self._refusal(count) if count > 0 else "a count is 0 or more"
            raise RewindError(f"{self!r} at {self._offset} tokens cannot rewind by {count}: {why}")
        self._offset -= count
        if self._offset < self._boundary:
            self._boundary, self._tail = self._offset, None

    def fork(self) -> Self:
        """An independent cache with the same rows; they are shared until one side writes."""
        self._tail_is_private = False
        return copy.copy(self)

    def export(self) -> dict[str, mx.array]:
        """The rows that a rewind may still need, in the order of their positions.

        They do not depend on how the rows came in.

        Returns:
            `span`: the first position kept, `offset` and the window, 0 where there is none;
            `k` and `v` [Hkv, N, D] where there are rows.
        """
        first = max(0, self._furthest - self._limit)
        arrays = {"span": mx.array([first, self._offset, self.reach], mx.int64)}
        if self._offset == 0:
            return arrays
        arrays["k"], arrays["v"] = newest_rows(self.rows(), first)
        return arrays

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave, of a cache with the same heads and window.

        A ring of another slack keeps what both have room for.

        Raises:
            CheckpointError: the arrays are none of a cache like this one; nothing has changed.
        """
        first, offset = check_exported(self, arrays)
        first = max(first, offset - self._limit)
        self._sealed = self._tail = None
        self._tail_is_private = False
        self._first = self._boundary = self._offset = first
        if offset:
            k, v = (arrays[name][:, first - offset :] for name in "kv")
            self._tail = RowBlock(k, v)
        self._offset = offset
        self._furthest = first + self._limit if first else offset
        self._seal()

    def _check_room(self, count: int) -> None:
        if self._offset + count > self.max_context:
            raise ContextLengthError(
                f"{self!r} at {self._offset} tokens cannot take {count} more: max_context is "
                f"{self.max_context}; load with a larger max_context or shorten the prompt"
            )

    def _fits(self, count: int) -> bool:
        tail = self._tail
        return tail is None or self._offset - self._boundary + count <= tail.capacity

    def _seal(self) -> None:
        """Move the tail's rows behind the sealed ones and drop the tail."""
        tail, start, end = self._tail, self._boundary, self._offset
        self._tail, self._boundary = None, end
        if tail is None or start == end:
            return
        sealed = self._grown(end, tail.k.dtype)
        k, v, row = sealed.k, sealed.v, max(start, end - self._limit)
        while row < end:
            slot = row % sealed.capacity
            upto = min(end, row + sealed.capacity - slot)
            k = _written(k, tail.k[:, row - start : upto - start], slot)
            v = _written(v, tail.v[:, row - start : upto - start], slot)
            row = upto
        self._sealed = RowBlock(k, v)
        self._first = max(self._first, end - self._limit)

    def _grown(self, end: int, dtype: mx.Dtype) -> RowBlock:
        sealed, needed = self._sealed, min(end, self._limit)
        have = sealed.capacity if sealed is not None else 0
        if sealed is not None and have >= needed:
            return sealed
        whole_tails = -(-needed // TAIL_ROWS) * TAIL_ROWS
        grown = self._new_block(min(self._limit, max(2 * have, whole_tails)), dtype)
        if sealed is None:
            return grown
        return RowBlock(_written(grown.k, sealed.k, 0), _written(grown.v, sealed.v, 0))

    def _new_block(self, capacity: int, dtype: mx.Dtype) -> RowBlock:
        k, v = (
            mx.zeros((self.num_kv_heads, capacity, dims), dtype)
            for dims in (self.head_dim, self.value_dim)
        )
        return RowBlock(k, v)


def _written(block: mx.array, rows: mx.array, at: int) -> mx.array:
    """A block whose rows from `at` on are `rows`; in place only where nothing else holds it."""
    return mx.slice_update(block, rows, mx.array([at]), axes=[1])


def _copied(block: mx.array) -> mx.array:
    return _written(mx.zeros_like(block), block, 0)

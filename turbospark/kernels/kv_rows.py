"""How kernels see a cache: rows of keys and values in at most two blocks of memory."""

from typing import NamedTuple, Protocol, Self

import mlx.core as mx

from turbospark.errors import ShapeError


class RowBlock:
    """Keys and values of some rows: k and v [Hkv, capacity, D], contiguous once evaluated.

    `capacity` is how many rows there is memory for. `addresses` is where a host kernel remembers
    the memory of k and v; a block's arrays are never rebound, so it stays right.
    """

    __slots__ = ("addresses", "capacity", "k", "v")

    def __init__(self, k: mx.array, v: mx.array) -> None:
        self.k = k
        self.v = v
        self.capacity = k.shape[1]
        self.addresses: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return self.k.nbytes + self.v.nbytes


class KVRows(NamedTuple):
    """One layer's rows as they are now, sealed part and tail.

    The row of position p, first <= p < end, is sealed row p % sealed.capacity when p < boundary,
    else tail row p - boundary. Rows that no position names hold anything.

    Attributes:
        sealed: rows of positions [first, boundary); None when boundary is 0.
        tail: rows of positions [boundary, end); None when there are none.
        first: the oldest position still held; 0 unless a ring has wrapped.
        boundary: where the tail begins.
        end: tokens written so far.
    """

    sealed: RowBlock | None
    tail: RowBlock | None
    first: int
    boundary: int
    end: int


def newest_rows(rows: KVRows, begin: int) -> tuple[mx.array, mx.array]:
    """Keys and values [Hkv, n, D] of positions begin .. rows.end - 1, in their order.

    Raises:
        ShapeError: none of these rows is there, or `begin` lies before the oldest one.
    """
    if not rows.first <= begin < rows.end:
        raise ShapeError(
            f"rows from position {begin} on of a cache that holds {rows.first} to {rows.end - 1}"
        )
    pieces: list[tuple[mx.array, mx.array]] = []
    row, sealed, tail = begin, rows.sealed, rows.tail
    while sealed is not None and row < rows.boundary:
        slot = row % sealed.capacity
        count = min(rows.boundary - row, sealed.capacity - slot)
        pieces.append((sealed.k[:, slot : slot + count], sealed.v[:, slot : slot + count]))
        row += count
    if tail is not None and row < rows.end:
        part = slice(row - rows.boundary, rows.end - rows.boundary)
        pieces.append((tail.k[:, part], tail.v[:, part]))
    keys, values = zip(*pieces, strict=True)
    return mx.concatenate(list(keys), axis=1), mx.concatenate(list(values), axis=1)


class StepRows(NamedTuple):
    """One layer's rows inside a step that is compiled once: what changes is an array.

    Attributes:
        sealed: rows of positions below lengths[0], as in `KVRows`; where there are none, the tail
            stands in.
        tail: rows of positions from lengths[0] on.
        lengths: int32 [2 or more], the position of the tail's first row and that of the step's
            first row. All layers of a model share it.
    """

    sealed: RowBlock
    tail: RowBlock
    lengths: mx.array


class RowStore(Protocol):
    """What attention kernels ask of a cache."""

    @property
    def offset(self) -> int:
        """Tokens written so far; also the position of the next one."""
        ...

    def rows(self) -> KVRows:
        """The rows as they are now."""
        ...

    def append(self, k: mx.array, v: mx.array) -> None:
        """Add rows [T, Hkv, D] at `offset`."""
        ...

    def reserve(self, count: int) -> tuple[RowBlock, int]:
        """Memory for the next `count` rows that nothing else reads, and their first row in it."""
        ...

    def advance(self, count: int) -> None:
        """Count rows that were written where `reserve` said."""
        ...

    def fork(self) -> Self:
        """An independent cache with the same content."""
        ...

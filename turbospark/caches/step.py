"""Row caches inside a step that is compiled once: arrays in, a new tail out."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.kv_rows import RowBlock, StepRows


class StepCache:
    """What a `RowCache` looks like to the units of a step whose positions are arrays.

    The tail is rebound by the step; everything else stays.

    Args:
        rows: sealed rows, the tail before the step, and the two lengths.
    """

    def __init__(self, rows: StepRows) -> None:
        self._rows = rows
        self._written = 0

    def rows(self) -> StepRows:
        """The rows as they are now."""
        return self._rows

    @property
    def offset(self) -> mx.array:
        """Position of the next row, an int32 scalar."""
        return self._rows.lengths[1] + self._written

    def append(self, k: mx.array, v: mx.array) -> None:
        """Add rows k and v [T, Hkv, D] behind those of the tail, which has room for them."""
        at = mx.reshape(self.offset - self._rows.lengths[0], (1,))
        tail = self._rows.tail
        keys, values = (mx.swapaxes(x, 0, 1).astype(tail.k.dtype) for x in (k, v))
        block = RowBlock(
            mx.slice_update(tail.k, keys, at, axes=[1]),
            mx.slice_update(tail.v, values, at, axes=[1]),
        )
        self.rebind(block, k.shape[0])

    def rebind(self, tail: RowBlock, count: int) -> None:
        """Take the tail with `count` more rows that a kernel has made."""
        if tail.k.shape != self._rows.tail.k.shape:
            raise ShapeError(f"a tail {tail.k.shape} where {self._rows.tail.k.shape} is needed")
        sealed = self._rows.sealed
        if sealed is self._rows.tail:
            sealed = tail
        self._rows = StepRows(sealed, tail, self._rows.lengths)
        self._written += count


class StepState:
    """What a `RecurrentCache` looks like there: state arrays in, new ones out."""

    def __init__(self, state: tuple[mx.array, ...]) -> None:
        self.state = state

    def advance(self, _count: int, state: tuple[mx.array, ...]) -> None:
        """Take the state after some rows more."""
        self.state = state

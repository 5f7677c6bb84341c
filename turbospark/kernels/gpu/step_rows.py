"""A cache's rows as the bodies of a decode step read them."""

import functools

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.kernel import resident
from turbospark.kernels.kv_rows import KVRows, RowBlock, StepRows


@functools.lru_cache(maxsize=4)
def lengths_of(boundary: int, start: int) -> mx.array:
    """What the kernels of a step are told: where the tail begins, where its first row stands."""
    return resident(mx.array([boundary, start], mx.int32))


def step_of(rows: KVRows, start: int) -> StepRows:
    """Rows as they are now, for a step whose first row stands at `start`.

    The arrays of one block stand in where no position lies in the other.

    Raises:
        ShapeError: there are no rows.
    """
    sealed, tail = rows.sealed, rows.tail
    if sealed is not None:
        tail = RowBlock(sealed.k, sealed.v) if tail is None else tail
    elif tail is not None:
        sealed = tail
    if sealed is None or tail is None:
        raise ShapeError("attention over a cache without rows")
    return StepRows(sealed, tail, lengths_of(rows.boundary, start))

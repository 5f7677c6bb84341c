"""Going back over all caches of a session at once: every one of them moves, or none does.

A point costs nothing: rows are cut by moving a cursor, and the state of a recurrent layer is a
value, of which a point holds a reference.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from turbospark.errors import RewindError
from turbospark.protocols import RollbackPoint, RowInputs


def checkpoint(caches: Sequence[Any]) -> RollbackPoint:
    """Where the caches stand: their offset, and recurrent states by reference."""
    states = {index: cache.state for index, cache in enumerate(caches) if cache.recurrent}
    return RollbackPoint(caches[0].offset if caches else 0, states)


def rollback(caches: Sequence[Any], point: RollbackPoint) -> None:
    """Take every cache back to a point.

    Raises:
        RewindError: the point lies ahead, lacks a recurrent state, or is further back than a
            cache can go; nothing has moved.
    """
    back = _distance(caches, point.position)
    for index, cache in enumerate(caches):
        if cache.recurrent and back and index not in point.recurrent:
            raise RewindError(
                f"{cache!r} at {cache.offset} tokens cannot go back by {back}: no state was kept "
                "at that position; reset and feed the text again"
            )
    _check_rows(caches, back)
    for index, cache in enumerate(caches):
        if not cache.recurrent:
            cache.rewind(back)
        elif index in point.recurrent:
            cache.place(point.position, point.recurrent[index])


def retain(
    caches: Sequence[Any], point: RollbackPoint, keep: int, row_inputs: Mapping[int, RowInputs]
) -> None:
    """Keep the first rows of the pass that began at a point, and take the rest back.

    Args:
        caches: rows are cut; a recurrent state becomes that after `keep` rows.
        point: taken before the pass.
        keep: 1 to the number of rows of the pass.
        row_inputs: by cache index, what the pass noted for every recurrent cache.

    Raises:
        RewindError: keep is no row count of the pass, a recurrent cache has no row inputs of
            it, or a cache cannot go back as far; nothing has moved.
    """
    rows = _distance(caches, point.position)
    if not 1 <= keep <= rows:
        raise RewindError(f"keep={keep} of a pass of {rows} rows: 1 to {rows} can be kept")
    if keep == rows:
        return
    states: dict[int, Any] = {}
    for index, cache in enumerate(caches):
        if cache.recurrent:
            noted = row_inputs.get(index)
            if noted is None or noted.rows != rows:
                raise RewindError(f"{cache!r}: the pass noted no inputs of its {rows} rows")
            states[index] = noted.replay(keep)
    _check_rows(caches, rows - keep)
    for index, cache in enumerate(caches):
        if cache.recurrent:
            cache.place(point.position + keep, states[index])
        else:
            cache.rewind(rows - keep)


def restore(caches: Sequence[Any], point: RollbackPoint) -> None:
    """Take each cache back to a point as far as it goes, after a pass that broke off.

    Such a pass may have advanced some caches and not others.
    """
    for index, cache in enumerate(caches):
        if index in point.recurrent:
            cache.place(point.position, point.recurrent[index])
        elif not cache.recurrent and cache.offset > point.position:
            cache.rewind(min(cache.offset - point.position, cache.max_rewind()))


def rewind_bound(caches: Sequence[Any]) -> int | None:
    """How many rows of every pass can be taken back; None is any number."""
    bounds = [cache.rewind_bound for cache in caches if not cache.recurrent]
    return min((bound for bound in bounds if bound is not None), default=None)


def max_row_rewind(caches: Sequence[Any]) -> int:
    """How many tokens every cache of rows can take back, recurrent ones left out."""
    offset = caches[0].offset if caches else 0
    return min((cache.max_rewind() for cache in caches if not cache.recurrent), default=offset)


def _distance(caches: Sequence[Any], position: int) -> int:
    offset = caches[0].offset if caches else 0
    if position > offset:
        raise RewindError(f"the point at {position} lies ahead of the caches' {offset} tokens")
    return offset - position


def _check_rows(caches: Sequence[Any], count: int) -> None:
    for cache in caches:
        if not cache.recurrent and count > cache.max_rewind():
            raise RewindError(
                f"{cache!r} at {cache.offset} tokens cannot go back by {count}: it can by "
                f"{cache.max_rewind()}; reset and feed the text again"
            )

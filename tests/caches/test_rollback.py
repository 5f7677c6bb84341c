"""Going back over several caches at once: all of them, or none."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from turbospark.caches.kv import KVCache
from turbospark.caches.recurrent import RecurrentCache
from turbospark.caches.ring import RingCache
from turbospark.caches.rollback import (
    checkpoint,
    max_row_rewind,
    restore,
    retain,
    rewind_bound,
    rollback,
)
from turbospark.errors import RewindError
from turbospark.protocols import RollbackPoint

WINDOW, SLACK = 7, 3


class Sums:
    """Row inputs of a layer whose state is the sum of its tokens."""

    def __init__(self, before: float, tokens: Sequence[int]) -> None:
        self.before, self.tokens, self.rows = before, tokens, len(tokens)
        self.replays: list[int] = []

    def replay(self, keep: int) -> tuple[mx.array, ...]:
        self.replays.append(keep)
        return (mx.array([self.before + sum(self.tokens[:keep])]),)


def make(*, ring: bool = True, recurrent: bool = True) -> list[Any]:
    caches: list[Any] = [KVCache(1, 3, 99)]
    if ring:
        caches.append(RingCache(1, 3, 99, WINDOW, SLACK))
    if recurrent:
        caches.append(RecurrentCache(lambda: (mx.array([0.0]),), 99))
    return caches


def feed(caches: Sequence[Any], tokens: Sequence[int]) -> dict[int, Sums]:
    noted: dict[int, Sums] = {}
    for index, cache in enumerate(caches):
        if cache.recurrent:
            before = cache.state[0].item()
            noted[index] = Sums(before, tokens)
            cache.advance(len(tokens), (mx.array([before + sum(tokens)]),))
        else:
            rows = mx.array([[[float(token)] * 3] for token in tokens])
            cache.append(rows, rows)
    return noted


def seen(caches: Sequence[Any]) -> list[Any]:
    return [(cache.offset, cache.state[0].item() if cache.recurrent else None) for cache in caches]


def test_a_point_holds_offsets_and_states_by_reference() -> None:
    caches = make()
    feed(caches, range(5))
    point = checkpoint(caches)
    assert point.position == 5
    assert set(point.recurrent) == {2}
    assert point.recurrent[2][0] is caches[2].state[0]
    assert checkpoint([]).position == 0


@pytest.mark.parametrize("count", [0, 1, SLACK])
def test_rollback_moves_every_cache(count: int) -> None:
    caches = make()
    feed(caches, range(20))
    point, before = checkpoint(caches), seen(caches)
    if count:
        feed(caches, range(30, 30 + count))
    rollback(caches, point)
    assert seen(caches) == before
    assert caches[2].state[0] is point.recurrent[2][0]


def test_rollback_past_one_cache_moves_none() -> None:
    caches = make()
    feed(caches, range(20))
    point = checkpoint(caches)
    feed(caches, range(SLACK + 1))
    before = seen(caches)
    with pytest.raises(RewindError, match=r"RingCache.*cannot go back by 4: it can by 3"):
        rollback(caches, point)
    assert seen(caches) == before


def test_rollback_without_a_recurrent_state_moves_none() -> None:
    caches = make()
    feed(caches, range(5))
    before = seen(caches)
    with pytest.raises(RewindError, match="no state was kept"):
        rollback(caches, RollbackPoint(4))
    with pytest.raises(RewindError, match="lies ahead"):
        rollback(caches, RollbackPoint(6))
    assert seen(caches) == before


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_retain_keeps_the_first_rows(keep: int) -> None:
    caches, never = make(), make()
    feed(caches, range(20))
    point = checkpoint(caches)
    noted = feed(caches, [30, 40, 50])
    retain(caches, point, keep, noted)
    feed(never, [*range(20), *[30, 40, 50][:keep]])
    assert seen(caches) == seen(never)
    assert noted[2].replays == ([keep] if keep < 3 else [])  # all rows need no replay


@pytest.mark.parametrize(
    ("keep", "rows", "message"),
    [(0, 3, "keep=0 of a pass of 3 rows"), (4, 3, "keep=4"), (2, 2, "noted no inputs of its 3")],
)
def test_retain_refuses_other_rows_and_moves_none(keep: int, rows: int, message: str) -> None:
    caches = make()
    feed(caches, range(20))
    point = checkpoint(caches)
    feed(caches, [30, 40, 50])
    before = seen(caches)
    with pytest.raises(RewindError, match=message):
        retain(caches, point, keep, {2: Sums(190, [30, 40, 50][:rows])})
    with pytest.raises(RewindError, match="noted no inputs"):
        retain(caches, point, 1, {})
    assert seen(caches) == before


def test_retain_past_the_slack_moves_none() -> None:
    caches = make()
    feed(caches, range(20))
    point = checkpoint(caches)
    noted = feed(caches, range(5))
    before = seen(caches)
    with pytest.raises(RewindError, match="cannot go back by 4"):
        retain(caches, point, 1, noted)
    assert seen(caches) == before


def test_restore_mends_caches_that_a_broken_pass_has_left_apart() -> None:
    caches = make()
    feed(caches, range(20))
    point, before = checkpoint(caches), seen(caches)
    feed([caches[0], caches[2]], [30, 31])
    restore(caches, point)
    assert seen(caches) == before
    feed(caches[1:], range(SLACK + 2))
    restore(caches, point)
    assert [cache.offset for cache in caches] == [20, 22, 20]  # the ring went as far as it can


def test_bounds_are_those_of_the_caches_of_rows() -> None:
    caches = make()
    feed(caches, range(20))
    assert rewind_bound(caches) == SLACK
    assert rewind_bound(make(ring=False)) is None
    assert rewind_bound([RingCache(1, 3, 10, WINDOW, SLACK)]) is None  # it never wraps
    assert max_row_rewind(caches) == SLACK
    assert max_row_rewind(caches[2:]) == 20
    assert max_row_rewind([caches[0], caches[2]]) == 20

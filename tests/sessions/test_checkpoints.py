"""Checkpoints of recurrent layers: by position, by budget, by reference."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from turbospark.protocols import RollbackPoint
from turbospark.sessions.checkpoints import Checkpoint, Checkpoints

STATE_BYTES = 28


def taken(position: int, *, ends_prompt: bool = False, size: int = 7) -> Checkpoint:
    return Checkpoint(RollbackPoint(position, {2: (mx.zeros(size),)}), position, ends_prompt)


def positions(checkpoints: Checkpoints) -> list[int]:
    return [kept.position for kept in checkpoints.all]


def filled(budget: int, *places: int, ends: tuple[int, ...] = ()) -> Checkpoints:
    checkpoints = Checkpoints(budget, every=4)
    for place in places:
        checkpoints.add(taken(place, ends_prompt=place in ends))
    return checkpoints


def test_they_hold_states_by_reference_and_count_their_bytes() -> None:
    checkpoints = Checkpoints(999)
    state = mx.zeros(7)
    checkpoints.add(Checkpoint(RollbackPoint(3, {2: (state,)})))
    assert checkpoints.all[0].point.recurrent[2][0] is state
    assert checkpoints.nbytes == STATE_BYTES


def test_the_oldest_give_way_over_the_budget() -> None:
    assert positions(filled(2 * STATE_BYTES, 2, 5, 9)) == [5, 9]
    assert positions(filled(2 * STATE_BYTES + 27, 2, 5, 9)) == [5, 9]
    assert positions(filled(3 * STATE_BYTES, 2, 5, 9)) == [2, 5, 9]


def test_the_newest_at_a_prompts_end_is_the_last_to_go() -> None:
    assert positions(filled(2 * STATE_BYTES, 2, 5, 9, 12, ends=(2,))) == [2, 12]
    assert positions(filled(2 * STATE_BYTES, 2, 5, 9, 12, ends=(2, 5))) == [5, 12]
    assert positions(filled(STATE_BYTES, 2, 5, 9, ends=(5,))) == [5]


def test_one_that_exceeds_the_budget_is_not_kept() -> None:
    checkpoints = filled(STATE_BYTES, 2)
    checkpoints.add(taken(5, size=8))
    assert positions(checkpoints) == [2]
    assert positions(filled(0, 2, 5)) == []


def test_what_the_drafter_kept_counts_and_is_left_out_first() -> None:
    checkpoints = Checkpoints(3 * STATE_BYTES)
    for position in (2, 5):
        point = RollbackPoint(position, {2: (mx.zeros(7),)})
        checkpoints.add(Checkpoint(point, SimpleNamespace(nbytes=STATE_BYTES)))
    assert positions(checkpoints) == [5]
    assert checkpoints.nbytes == 2 * STATE_BYTES
    checkpoints.add(Checkpoint(point, SimpleNamespace(nbytes=3 * STATE_BYTES)))
    assert [kept.mark for kept in checkpoints.all] == [None]


def test_the_same_position_is_kept_once_and_stays_a_prompts_end() -> None:
    checkpoints = filled(2 * STATE_BYTES, 2, ends=(2,))
    checkpoints.add(Checkpoint(RollbackPoint(2, {2: (mx.zeros(7),)}), "newer"))
    assert positions(checkpoints) == [2]
    assert checkpoints.all[0].mark == "newer"
    assert checkpoints.all[0].ends_prompt


def test_position_0_needs_none() -> None:
    assert positions(filled(999, 0)) == []


@pytest.mark.parametrize(("position", "due"), [(3, False), (4, True), (12, False), (13, True)])
def test_one_is_due_after_so_many_tokens(position: int, due: bool) -> None:
    checkpoints = filled(999) if position < 9 else filled(999, 9)
    assert checkpoints.due(position) == due
    assert not Checkpoints(0, every=4).due(position)


def test_those_beyond_a_position_are_forgotten() -> None:
    checkpoints = filled(999, 2, 5, 9)
    twin = checkpoints.copy()
    checkpoints.drop_beyond(5)
    assert positions(checkpoints) == [2, 5]
    checkpoints.clear()
    assert len(checkpoints) == 0
    assert positions(twin) == [2, 5, 9]

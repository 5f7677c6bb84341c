"""Fitting a conversation into its context."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbospark.runner.window import Fitted, fit


def words(turns: Sequence[str]) -> int:
    """Two tokens of framing, and one a letter and a turn."""
    return 2 + sum(len(turn) + 1 for turn in turns)


def fitted(turns: Sequence[str], bound: int, *, leading: bool = False) -> Fitted[str]:
    return fit(turns, has_leading_instruction=leading, bound=bound, measure=words)


def test_what_fits_stays_whole() -> None:
    assert fitted(["aa", "bbb", "c"], 12) == Fitted(("aa", "bbb", "c"), 11, 0, True)


def test_a_conversation_that_just_fills_the_bound_leaves_no_room_and_shrinks() -> None:
    assert fitted(["aa", "bbb", "c"], 11) == Fitted(("bbb", "c"), 8, 1, True)


def test_the_oldest_turns_go_first_and_no_more_of_them_than_needed() -> None:
    assert fitted(["aa", "bbb", "c", "dddd"], 13).retained == ("c", "dddd")
    assert fitted(["aa", "bbb", "c", "dddd"], 14).retained == ("bbb", "c", "dddd")


def test_a_leading_instruction_stays() -> None:
    assert fitted(["aa", "bbb", "c", "dddd"], 14, leading=True).retained == ("aa", "c", "dddd")


@pytest.mark.parametrize("leading", [False, True])
def test_instruction_and_newest_turn_stay_though_they_do_not_fit(leading: bool) -> None:
    out = fitted(["aaaa", "b", "cccc"], 3, leading=leading)
    assert out.retained == (("aaaa", "cccc") if leading else ("cccc",))
    assert out.room_for_generation is False
    assert out.length == words(out.retained)


@pytest.mark.parametrize("leading", [False, True])
def test_a_single_turn_and_none_are_left_alone(leading: bool) -> None:
    assert fitted(["aaaa"], 1, leading=leading) == Fitted(("aaaa",), 7, 0, False)
    assert fitted([], 1, leading=leading) == Fitted((), 2, 0, False)


@given(st.lists(st.text("xy", max_size=5), max_size=8), st.integers(0, 40), st.booleans())
def test_any_conversation_keeps_its_ends_its_order_and_as_much_as_fits(
    turns: list[str], bound: int, leading: bool
) -> None:
    before = list(turns)
    out = fitted(turns, bound, leading=leading)
    assert turns == before
    head = 1 if leading else 0
    assert list(out.retained) == turns[:head] + turns[head + out.removed :]
    assert out.length == words(out.retained)
    assert out.room_for_generation is (out.length < bound)
    if turns:
        assert out.retained[-1] == turns[-1]
    if out.removed:
        assert words(turns[:head] + turns[head + out.removed - 1 :]) >= bound
    if not out.room_for_generation:
        assert len(out.retained) <= head + 1

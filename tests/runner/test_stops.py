"""Stop strings: nothing of them is shown, however the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbospark.runner.stops import StopMatcher

TEXT = st.text(alphabet="abč😀", max_size=24)
STOPS = st.lists(st.text(alphabet="abč😀", min_size=1, max_size=4), max_size=3)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces(text, cuts))
    return shown + matcher.flush(), matcher.matched


@given(TEXT, STOPS, st.lists(st.integers(0, 99), max_size=8))
def test_shown_text_and_stop_string_begin_the_text(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    shown, stop = run(text, stops, cuts)
    if stop is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert stop in stops
        assert text.startswith(shown + stop)
        assert not any(other in shown for other in stops)


@given(TEXT, STOPS, st.lists(st.integers(0, 99), max_size=8))
def test_the_cuts_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    assert run(text, stops, cuts) == run(text, stops, list(range(len(text))))


@given(TEXT, STOPS, st.lists(st.integers(0, 99), max_size=8))
def test_only_what_may_become_a_stop_string_is_held_back(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    fed = shown = ""
    for piece in pieces(text, cuts):
        fed, shown = fed + piece, shown + matcher.feed(piece)
        if matcher.matched is None:
            held = fed[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "shown", "matched"),
    [(["abcd", "c"], "ab", "c"), (["bc", "abc"], "", "abc"), (["cd", "bcd"], "a", "bcd")],
)
def test_the_match_that_ends_first_wins_and_then_the_longest(
    stops: list[str], shown: str, matched: str
) -> None:
    assert run("abcd", stops, []) == (shown, matched)


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.feed("1x2") == "1"
    assert matcher.feed("3") == ""
    assert matcher.flush() == ""

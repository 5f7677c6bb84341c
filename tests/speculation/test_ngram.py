"""Drafting by lookup: what matches, what follows, and an index that can be cut."""

import json
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from turbospark.errors import CheckpointError, OptionError, ProducerError
from turbospark.protocols import ForwardOutput
from turbospark.speculation.ngram import NgramDrafter, NgramIndex
from turbospark.testing import ByteTokenizer

NOTHING = ForwardOutput(None)


def propose(ids: list[int], count: int = 4, **options: int) -> list[int]:
    drafter = NgramDrafter(**options)
    return drafter.block(drafter.new_state(999), ids[:-1], ids[-1], count)


def naive(ids: list[int], least: int, most: int, count: int) -> list[int]:
    """The definition: the longest earlier equal of the end, the newest of equally long ones."""
    end, best, best_length = len(ids), None, least - 1
    for place in range(end - 1, 0, -1):
        length = 0
        while length < min(most, place) and ids[place - 1 - length] == ids[end - 1 - length]:
            length += 1
        if length > best_length:
            best, best_length = place, length
    if best is None:
        return []
    text = list(ids)
    for index in range(count):
        text.append(text[best + index])
    return text[end:]


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]


def test_a_match_is_at_least_three_tokens_long() -> None:
    assert propose([1, 2, 8, 9, 5, 1, 2]) == []
    assert propose([1, 2, 8, 9, 5, 1, 2], least=2) == [8, 9, 5, 1]
    assert propose([7, 1, 2, 8, 9, 5, 7, 1, 2]) == [8, 9, 5, 7]


def test_the_longest_match_wins_and_the_newest_of_equals() -> None:
    text = [9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3, 70, 9, 1, 2, 3]
    assert propose(text, 1) == [50]
    assert propose(text, 1, most=3) == [70]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert propose([4, 5, 6, 4, 5, 6, 4], 8) == [5, 6, 4, 5, 6, 4, 5, 6]
    assert propose([4, 4, 4, 4], 5) == [4] * 5


@pytest.mark.parametrize("ids", [[1], [1, 1], [1, 2, 3], list(range(50))])
def test_without_a_match_nothing_is_proposed(ids: list[int]) -> None:
    assert propose(ids) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=50), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_proposals_are_those_of_the_definition(ids: list[int], least: int, more: int) -> None:
    for count in (1, 5):
        expected = naive(ids, least, least + more, count)
        assert propose(ids, count, least=least, most=least + more) == expected


def rows_of_json(count: int) -> str:
    rows = [{"id": n, "name": f"item {n}", "ok": n % 2 == 0} for n in range(count)]
    return json.dumps(rows)


def drafted(text: str, least: int) -> tuple[int, int]:
    """Proposals over a whole text fed token by token, and how many of them were right."""
    ids = ByteTokenizer().encode(text)
    drafter = NgramDrafter(least=least, most=max(8, least))
    state = drafter.new_state(9999)
    place, proposed, right = 1, 0, 0
    while place < len(ids) - 4:
        draft = drafter.block(state, ids[:place], ids[place], 4)
        agree = 0
        while agree < len(draft) and draft[agree] == ids[place + 1 + agree]:
            agree += 1
        proposed, right = proposed + len(draft), right + agree
        place += agree + 1
    return proposed, right


def test_structured_text_sets_off_short_matches_that_are_wrong() -> None:
    proposed, right = drafted(rows_of_json(12), NgramDrafter().least)
    short_proposed, short_right = drafted(rows_of_json(12), 1)
    assert right / proposed > 0.7
    assert short_proposed - short_right > 2 * (proposed - right)
    # Two tokens such as `",` alone are no reason to propose anything.
    assert propose([*ByteTokenizer().encode('["a", 17, "b",'), 9, *b'",'], 4) == []


class IndexMachine(RuleBasedStateMachine):
    """Growing and cutting in any order leaves the index of the text that stands."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.text = NgramIndex(2), list[int]()

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6))
    def extend(self, tokens: list[int]) -> None:
        self.index.extend(tokens)
        self.text += tokens

    @rule(back=st.integers(0, 9))
    def cut(self, back: int) -> None:
        del self.text[max(0, len(self.text) - back) :]
        self.index.cut(len(self.text))

    @rule(tokens=st.lists(st.integers(0, 2), max_size=3))
    def fork_and_advance_the_fork(self, tokens: list[int]) -> None:
        self.index.copy().extend(tokens)

    @invariant()
    def it_finds_what_a_fresh_one_finds(self) -> None:
        assert list(self.index.ids) == self.text
        assert self.index.followers(4, 3) == naive(self.text, 2, 4, 3)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_state_that_lags_or_runs_ahead_reads_up_or_forgets() -> None:
    drafter, text = NgramDrafter(), [1, 2, 3, 4, 9, 1, 2]
    state = drafter.new_state(99)
    drafter.observe(state, text[:3], 2, NOTHING)
    assert state.cursor == 3
    assert drafter.block(state, text, 3, 2) == [4, 9]
    assert state.cursor == 7
    state.rewind(2)
    assert (state.cursor, state.resume_at(50)) == (2, 50)
    drafter.prime(state, text, 3)
    assert state.cursor == 7
    assert state.nbytes > 0


def test_a_fork_goes_its_own_way() -> None:
    drafter, state = NgramDrafter(), NgramDrafter().new_state(99)
    drafter.observe(state, [1, 2, 3, 4, 9, 1, 2], 0, NOTHING)
    twin = state.fork()
    assert drafter.block(twin, [1, 2, 3, 4, 9, 1, 2, 3, 7, 7], 7, 2) == []
    assert drafter.block(state, [1, 2, 3, 4, 9, 1, 2], 3, 2) == [4, 9]


def test_a_saved_state_needs_no_arrays_and_takes_none() -> None:
    drafter = NgramDrafter()
    state = drafter.new_state(99)
    drafter.observe(state, [1, 2, 3, 4, 9, 1, 2], 0, NOTHING)
    fresh = drafter.new_state(99)
    fresh.restore(state.export())
    assert fresh.mark() is None
    assert drafter.block(fresh, [1, 2, 3, 4, 9, 1, 2], 3, 2) == [4, 9]
    with pytest.raises(CheckpointError, match="rows for a drafter"):
        fresh.restore({"rows": mx.zeros(3)})


@pytest.mark.parametrize("options", [{"least": 0}, {"least": 4, "most": 3}, {"max_block": 0}])
def test_lengths_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        NgramDrafter(**options)


def test_calls_that_lookup_cannot_serve_are_refused() -> None:
    drafter = NgramDrafter(max_block=5)
    state = drafter.new_state(99)
    for count in (0, 6):
        with pytest.raises(ProducerError, match=f"{count} proposals"):
            drafter.block(state, [1], 2, count)
    with pytest.raises(ProducerError, match="no draft step"):
        drafter.step(state, 1, 0)

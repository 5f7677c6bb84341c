"""The reuse decision, pure: length and reason for one candidate."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbospark.protocols import RollbackPoint
from turbospark.sessions.checkpoints import Checkpoint
from turbospark.sessions.fed_ids import FedIds
from turbospark.sessions.prefix import Candidate, decide_reuse, is_shallow


class Follower:
    """A drafter's state that has seen so many tokens; it gives `lag` tokens up to go back."""

    nbytes = 0

    def __init__(self, covered: int, lag: int = 1) -> None:
        self.cursor = self.covered = covered
        self.lag = lag

    def resume_at(self, keep: int, mark: Any = None) -> int:
        if mark == keep or keep == self.covered:
            return keep
        return 0 if keep > self.covered else max(keep - self.lag, 0)


def fed(*ids: int) -> FedIds:
    record = FedIds()
    record.record(ids, 0)
    return record


def candidate(
    ids: Sequence[int] = (1, 2, 3),
    *,
    position: int | None = None,
    max_rewind: int = 99,
    **more: Any,
) -> Candidate:
    return Candidate(
        fed(*ids), len(ids) if position is None else position, max_rewind=max_rewind, **more
    )


def kept_at(*positions: int, marked: bool = True) -> list[Checkpoint]:
    state = (mx.zeros(3),)
    return [
        Checkpoint(RollbackPoint(position, {1: state}), position if marked else None)
        for position in positions
    ]


@pytest.mark.parametrize(
    ("prompt", "position", "max_rewind", "tokens", "reason"),
    [
        ([1, 2, 3, 4], 3, 0, 3, "continues"),
        ([1, 2, 9, 9], 3, 1, 2, "parts from what was fed at token 2; 1 taken back"),
        ([1, 2, 9, 9], 3, 0, 0, "going back 1 tokens is more than the 0"),
        ([1, 2, 3], 3, 1, 2, "all of the prompt but its last token"),
        ([9, 2, 3], 3, 3, 0, "differs from what was fed at token 0"),
        ([1], 3, 3, 0, "one token"),
        ([1, 2, 3, 4], 2, 2, 0, "hold 2 tokens where the record has 3"),
    ],
)
def test_the_decision_names_its_reason(
    prompt: list[int], position: int, max_rewind: int, tokens: int, reason: str
) -> None:
    decision = decide_reuse(candidate(position=position, max_rewind=max_rewind), prompt)
    assert decision.tokens == tokens
    assert reason in decision.reason
    assert decision.draft_off == ""


def test_tainted_and_empty_records_keep_nothing_and_say_why() -> None:
    tainted = candidate()
    tainted.fed.taint("the roof fell in")
    assert decide_reuse(tainted, [1, 2, 3, 4]).reason == "the roof fell in"
    assert decide_reuse(tainted, [1, 2, 3, 4]).tokens == 0
    assert "nothing was fed" in decide_reuse(candidate(()), [1, 2]).reason


@pytest.mark.parametrize(
    ("checkpoints", "max_rewind", "tokens"),
    [((), 99, 0), ((2, 4), 99, 4), ((2, 5), 99, 5), ((2, 6), 99, 2), ((6, 7), 99, 0), ((2,), 3, 0)],
)
def test_recurrent_layers_go_back_to_a_checkpoint_within_reach_of_the_rows(
    checkpoints: tuple[int, ...], max_rewind: int, tokens: int
) -> None:
    offer = candidate(
        range(8), recurrent=True, checkpoints=kept_at(*checkpoints), max_rewind=max_rewind
    )
    decision = decide_reuse(offer, [0, 1, 2, 3, 4, 50, 51])
    assert decision.tokens == tokens
    if tokens:
        assert decision.checkpoint is not None
        assert decision.checkpoint.position == tokens
    assert "checkpoint" in decision.reason or "going back" in decision.reason or tokens == 5


def test_a_continuation_needs_no_checkpoint() -> None:
    decision = decide_reuse(candidate(range(5), recurrent=True), [*range(5), 9])
    assert (decision.tokens, decision.checkpoint) == (5, None)


@pytest.mark.parametrize(("covered", "tokens"), [(8, 4), (6, 4), (5, 5), (4, 0), (0, 0)])
def test_a_drafter_bounds_what_is_kept(covered: int, tokens: int) -> None:
    offer = candidate(range(8), drafter=Follower(covered))
    decision = decide_reuse(offer, [0, 1, 2, 3, 4, 50, 51])
    assert decision.tokens == tokens
    if tokens == 0:
        assert "has not seen all of the 5 tokens" in decision.reason
    elif tokens == 4:
        assert "1 of them for the drafter" in decision.reason


def test_a_drafter_goes_to_a_checkpoint_by_its_mark_or_to_an_earlier_one() -> None:
    prompt = [*range(6), 50, 51]
    for marked, tokens in ((True, 6), (False, 2)):
        offer = candidate(
            range(8),
            recurrent=True,
            checkpoints=kept_at(2, 6, marked=marked),
            drafter=Follower(8),
        )
        assert decide_reuse(offer, prompt).tokens == tokens


@pytest.mark.parametrize(("seen", "tokens", "off"), [(68, 68, False), (67, 100, True)])
def test_reuse_is_preferred_where_much_would_be_fed_again_for_the_drafter(
    seen: int, tokens: int, off: bool
) -> None:
    class Behind(Follower):
        def resume_at(self, keep: int, mark: Any = None) -> int:
            return min(keep, self.covered)

    offer = candidate(range(100), drafter=Behind(seen))
    prompt = [*range(100), 7]
    assert decide_reuse(offer, prompt).tokens == seen
    decision = decide_reuse(offer, prompt, prefer_reuse=True)
    assert decision.tokens == tokens
    assert bool(decision.draft_off) == off


def test_a_shallow_match_does_not_turn_drafting_off() -> None:
    offer = candidate(range(100), drafter=Follower(0))
    prompt = [*range(40), 200, 201]
    assert decide_reuse(offer, prompt, prefer_reuse=True).tokens == 0


def test_sharing_one_token_with_a_drafter_keeps_none() -> None:
    decision = decide_reuse(candidate(drafter=Follower(3)), [1, 8, 9])
    assert decision.tokens == 0
    assert "fed again for the drafter" in decision.reason


@pytest.mark.parametrize(("shared", "shallow"), [(3, True), (4, False), (5, False)])
def test_a_match_is_shallow_if_more_would_be_taken_back_than_shared(
    shared: int, shallow: bool
) -> None:
    assert is_shallow(candidate(range(8)), [*range(shared), 50, 51]) == shallow


@pytest.mark.parametrize(
    ("prompt", "prompt_end", "shallow"),
    [
        ([0, 1, 2], 3, False), ([0, 1, 9], 3, True), ([0, 1], 3, True), ([0, 1, 2], 5, True),
        ([*range(10)], 10, False),
    ],
)  # fmt: skip
def test_the_last_prompt_sent_again_is_not_shallow(
    prompt: list[int], prompt_end: int, shallow: bool
) -> None:
    assert is_shallow(candidate(range(9), prompt_end=prompt_end), prompt) == shallow


@given(
    st.lists(st.integers(0, 1), max_size=9),
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(0, 9),
    st.booleans(),
    st.sets(st.integers(1, 9)),
    st.integers(0, 9),
    st.booleans(),
)
def test_what_is_kept_is_shared_and_reachable(
    ids: list[int],
    prompt: list[int],
    max_rewind: int,
    recurrent: bool,
    positions: set[int],
    covered: int,
    prefer: bool,
) -> None:
    places = sorted(position for position in positions if position <= len(ids))
    offer = candidate(
        ids,
        max_rewind=max_rewind,
        recurrent=recurrent,
        checkpoints=kept_at(*places),
        drafter=Follower(min(covered, len(ids))),
    )
    decision = decide_reuse(offer, prompt, prefer_reuse=prefer)
    assert decision.reason
    tokens = decision.tokens
    assert 0 <= tokens < len(prompt)
    assert prompt[:tokens] == ids[:tokens]
    if tokens and tokens < len(ids):
        assert len(ids) - tokens <= max_rewind
        assert not recurrent or tokens in places
    if tokens and not decision.draft_off:
        mark = None if decision.checkpoint is None else decision.checkpoint.mark
        drafter, shared = Follower(min(covered, len(ids))), offer.fed.common_prefix(prompt)
        knows_next = tokens < shared and drafter.resume_at(tokens + 1) >= tokens
        assert drafter.resume_at(tokens, mark) == tokens or knows_next

"""Speculative rounds over scripted producers: the text is plain decoding's, and so is the state."""

import json
from typing import Any

import numpy as np
import pytest
from runner.drafting import (
    KINDS,
    PENALTIES,
    PROMPT,
    SAMPLED,
    VOCAB,
    LookupSpeculator,
    Run,
    assert_settled,
    looping,
    plain,
    speculator,
    tokens_of,
)

from turbospark.protocols import SpeculativeProducer
from turbospark.runner.sink import FinishReason
from turbospark.runner.speculative import round_block
from turbospark.speculation.adaptive import AdaptiveBlock
from turbospark.testing import scripted_logits

BLOCKS = range(1, 9)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_plain_decoding(kind: str, block: int) -> None:
    text = tokens_of(plain())
    run = Run(speculator(kind), block)
    assert run.tokens() == text
    assert_settled(run, len(text), text)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_of_a_model_that_never_repeats_is_the_same_too(kind: str) -> None:
    def hashed(ids: Any) -> Any:
        return looping([sum(ids), len(ids)])

    text = tokens_of(plain(hashed))
    for block in BLOCKS:
        assert Run(speculator(kind, hashed), block).tokens() == text


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_end_of_the_budget_no_row_is_verified_that_could_not_be_kept(kind: str) -> None:
    text = tokens_of(plain())
    for budget in range(1, 12):
        for block in (1, 2, 3, 8):
            run = Run(speculator(kind), block, tokens=budget)
            assert run.tokens() == text[:budget]
            assert_settled(run, budget, text)
            assert run.producer.furthest <= len(PROMPT) + budget - 1


@pytest.mark.parametrize("kind", ["perfect", "useless", "perfect block", "ngram"])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_near_the_end_of_the_context_a_round_shrinks_to_what_fits(kind: str, block: int) -> None:
    room = 14
    run = Run(speculator(kind), block, tokens=99, context=len(PROMPT) + room)
    text = [next(run.steps).committed.token for _ in range(room + 1)]
    assert text == tokens_of(plain(tokens=99))[: room + 1]
    assert run.producer.furthest == len(PROMPT) + room


@pytest.mark.parametrize(
    ("wish", "remaining", "room", "block"),
    [(4, 9, 9, 4), (4, 4, 9, 3), (4, 1, 9, 0), (4, 9, 2, 2), (4, 9, 0, 0), (0, 9, 9, 0)],
)
def test_a_round_is_as_long_as_wish_budget_and_room_allow(
    wish: int, remaining: int, room: int, block: int
) -> None:
    assert round_block(wish, remaining=remaining, room=room) == block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 3, 8])
def test_a_stop_token_inside_a_round_ends_it_there(kind: str, block: int) -> None:
    whole = tokens_of(plain())
    for stop in dict.fromkeys(whole):
        run = Run(speculator(kind), block, sink={"stop_ids": [stop]})
        steps = list(run.steps)
        text = whole[: whole.index(stop) + 1]
        assert tokens_of(steps) == text
        assert steps[-1].committed.reason is FinishReason.STOP_TOKEN
        assert steps[-1].committed.text == ""
        assert_settled(run, len(text), text)


def letters(ids: Any) -> Any:
    """The looping model again, its tokens spelt with letters."""
    row = np.full(VOCAB + 97, -50.0)
    row[97:] = looping([max(token - 97, 0) for token in ids])
    return row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [2, 5])
def test_a_stop_string_inside_a_round_shows_what_plain_decoding_shows(
    kind: str, block: int
) -> None:
    options: dict[str, Any] = {"vocab": VOCAB + 97}
    shown = "".join(step.committed.text for step in plain(letters, **options))
    for at in range(12):
        for width in (1, 2, 3):
            sink = {"stops": [shown[at : at + width]]}
            expected = plain(letters, sink=sink, **options)
            run = Run(speculator(kind, letters), block, sink=sink, **options)
            steps = list(run.steps)
            assert [step.committed for step in steps] == [step.committed for step in expected]
            assert_settled(run, len(steps), tokens_of(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 4])
def test_cancelling_inside_a_round_ends_it_at_that_token(kind: str, block: int) -> None:
    whole = tokens_of(plain())
    for after in range(1, 12):
        polls = iter(range(1, 99))
        run = Run(speculator(kind), block, sink={"cancelled": lambda: next(polls) == after})  # noqa: B023
        steps = list(run.steps)
        assert tokens_of(steps) == whole[:after]
        assert steps[-1].committed.reason is FinishReason.CANCELLED
        assert_settled(run, after, whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 2, 5, 8])
def test_closing_at_any_token_leaves_all_fed_but_that_one(kind: str, block: int) -> None:
    text = tokens_of(plain())
    for given in range(15):
        run = Run(speculator(kind), block)
        assert [next(run.steps).committed.token for _ in range(given)] == text[:given]
        run.steps.close()  # type: ignore[attr-defined]
        assert_settled(run, given, text)
        run.producer.produce(3, len(run.producer.fed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.1},
        PENALTIES,
        {"top_k": 9, "top_p": 0.9, "min_p": 0.02, **PENALTIES},
    ],
    ids=["alone", "top-k", "top-p", "min-p", "penalties", "all"],
)
def test_a_seed_gives_the_very_text_of_plain_decoding(
    kind: str, block: int, options: dict[str, Any]
) -> None:
    run = Run(speculator(kind), block, **SAMPLED, **options)
    assert run.tokens() == tokens_of(plain(**SAMPLED, **options))


@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, **PENALTIES}])
def test_all_that_a_drafter_of_the_targets_own_law_proposes_stays(options: Any) -> None:
    run = Run(speculator("perfect"), 4, tokens=26, **options)
    steps = list(run.steps)
    assert [step.from_draft for step in steps] == ([False] + [True] * 4) * 5 + [False]
    assert steps[-1].drafts.accepted == steps[-1].drafts.drafted == 20
    assert steps[-1].drafts.accepted_per_position == (5, 5, 5, 5)
    assert (steps[-1].drafts.rounds, steps[-1].drafts.rollbacks) == (5, 0)


@pytest.mark.parametrize("kind", ["useless", "useless block"])
def test_a_drafter_that_is_always_wrong_costs_rows_and_nothing_else(kind: str) -> None:
    run = Run(speculator(kind), 3)
    steps = list(run.steps)
    assert tokens_of(steps) == tokens_of(plain())
    assert not any(step.from_draft for step in steps)
    drafts = steps[-1].drafts
    assert (drafts.accepted, drafts.accepted_per_position) == (0, (0, 0, 0))
    assert drafts.rollbacks == drafts.rounds == 21  # the last token needs none, the first has none
    assert run.producer.calls.count("rollback_retaining") == 21


def test_counts_grow_token_by_token_and_tell_places_apart() -> None:
    run = Run(speculator("alternating block"), 3, tokens=9)
    seen = [(s.from_draft, s.drafts.drafted, s.drafts.accepted) for s in run.steps]
    # Even positions are drafted right: the prompt ends at an odd one, 7 is sampled, 8 drafted.
    assert seen == [
        (False, 0, 0), (True, 3, 1), (False, 3, 1), (True, 6, 2), (False, 6, 2), (True, 9, 3),
        (False, 9, 3), (True, 10, 4), (False, 10, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_adapts_changes_no_token(kind: str) -> None:
    for options in ({}, SAMPLED):
        policy = AdaptiveBlock(4)
        text = tokens_of(plain(tokens=60, **options))
        for _ in range(2):
            run = Run(speculator(kind), policy, tokens=60, **options)
            assert run.tokens() == text
            assert_settled(run, 60, text)


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_structured_text_full_of_short_matches_is_not_bent_by_them(least: int, block: int) -> None:
    said = [{"name": "get_weather", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
    script = list(json.dumps(said).encode())
    prompt = list(json.dumps([{"name": "get_time", "arguments": {"city": "Osaka"}}]).encode())
    logits_of = scripted_logits(259, script, len(prompt))
    producer = LookupSpeculator(logits_of, least=least)
    run = Run(producer, block, prompt=prompt, tokens=len(script), vocab=259)
    steps = list(run.steps)
    assert bytes(tokens_of(steps)) == json.dumps(said).encode()
    assert steps[-1].drafts.accepted > 20


class Watched(AdaptiveBlock):
    """Two proposals at every other step, and a record of what it was told."""

    def __init__(self) -> None:
        super().__init__(2)
        self.told: list[tuple[int, int]] = []

    def choose(self) -> int:
        return 2 * (len(self.told) % 2)

    def note_plain(self, seconds: float) -> None:
        assert seconds > 0.0
        self.told.append((0, 0))

    def note_round(self, drafted: int, accepted: int, seconds: float) -> None:
        assert seconds > 0.0
        self.told.append((drafted, accepted))


def test_the_controller_is_told_of_every_pass() -> None:
    policy = Watched()
    Run(speculator("perfect"), policy, tokens=13).tokens()
    assert policy.told == [(0, 0), (2, 2)] * 3
    policy = Watched()
    Run(speculator("useless"), policy, tokens=6).tokens()
    assert policy.told == [(0, 0), (2, 0), (0, 0), (1, 0), (0, 0)]


def test_times_are_the_loops_own_and_none_is_lost() -> None:
    run = Run(speculator("alternating"), 3)
    assert all(step.seconds > 0.0 for step in run.steps)


def test_the_scripted_speculator_speaks_the_protocol() -> None:
    assert isinstance(speculator("perfect"), SpeculativeProducer)

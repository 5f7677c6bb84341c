"""Whole generations that draft, over the real runner: text, session, drafter and results."""

from typing import Any

import pytest
from runner.drafting import PROMPT, VOCAB, looping
from runner.generations import CONTEXT, KINDS, STEP_BACK, assert_drafter_follows, make, stream, text

from turbospark.errors import OptionError
from turbospark.runner.runner import Runner
from turbospark.speculation.adaptive import AdaptiveBlock
from turbospark.speculation.off import NoDrafter
from turbospark.testing import ScriptedDrafter


@pytest.mark.parametrize("recurrent", [0, 2])
@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_text_and_session_are_those_of_plain_decoding(
    kind: str, block: int, recurrent: int
) -> None:
    expected = text(make(None, recurrent=recurrent))
    runner = make(kind, recurrent=recurrent)
    out = text(runner, draft_block=block)
    assert out.token_ids == expected.token_ids
    assert runner.session.fed_ids.ids == [*PROMPT, *expected.token_ids[:-1]]
    assert runner.session.text_ids == [*PROMPT, *expected.token_ids]
    assert {cache.offset for cache in runner.session.caches} == {len(PROMPT) + 24}
    assert_drafter_follows(runner)
    assert out.drafted > 0
    assert out.draft_off_reason is None


@pytest.mark.parametrize("recurrent", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_turns_that_follow_reuse_all_and_draft_on(kind: str, recurrent: int) -> None:
    runner, plain, prompt = make(kind, recurrent=recurrent), make(None), PROMPT
    drafted = 0
    for turn in range(4):
        out = text(runner, prompt, draft_block=3, max_tokens=9)
        assert out.token_ids == text(plain, prompt, max_tokens=9).token_ids
        assert out.reused_tokens == (0 if turn == 0 else len(prompt) - 3)
        assert out.drafted > 0 or kind == "ngram"
        assert_drafter_follows(runner)
        prompt, drafted = [*prompt, *out.token_ids, 3, 4], drafted + out.drafted
    assert drafted > 0


class RightFor(ScriptedDrafter):
    """Right about so many proposals of each round, wrong about the rest."""

    def __init__(self, right: int) -> None:
        super().__init__(looping, block_passes=True)
        self.right = right

    def block(self, state: Any, ids: Any, anchor: int, count: int) -> list[int]:
        proposals = super().block(state, ids, anchor, count)
        wrong = [(token + 1) % VOCAB for token in proposals[self.right :]]
        return [*proposals[: self.right], *wrong]


@pytest.mark.parametrize("recurrent", [0, 1, 3])
@pytest.mark.parametrize("right", range(6))
def test_whatever_number_of_proposals_stays_states_and_logits_are_those_of_plain_decoding(
    right: int, recurrent: int
) -> None:
    plain, runner = make(None, recurrent=recurrent), make(RightFor(right), recurrent=recurrent)
    expected = list(stream(plain))
    for step, other in zip(stream(runner, draft_block=5), expected, strict=True):
        assert step.token == other.token
        assert step.logits is not None
        assert other.logits is not None
        assert step.logits.tolist() == other.logits.tolist()
    kept = [count > 0 for count in step.accepted_per_position]
    assert kept == [True] * right + [False] * (5 - right)
    for cache, other_cache in zip(runner.session.caches, plain.session.caches, strict=True):
        ours, theirs = cache.export(), other_cache.export()
        assert {name: array.tolist() for name, array in ours.items()} == {
            name: array.tolist() for name, array in theirs.items()
        }


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_end_of_the_context_the_last_token_is_reached(kind: str) -> None:
    prompt = list(range(1, 20)) * 5
    expected = text(make(None), prompt, max_tokens=-1)
    assert len(expected.token_ids) == CONTEXT - len(prompt)
    runner = make(kind)
    assert text(runner, prompt, max_tokens=-1, draft_block=8).token_ids == expected.token_ids
    assert runner.session.position == CONTEXT - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_adapts_learns_across_turns_and_changes_no_token(kind: str) -> None:
    runner, plain, prompt = make(kind), make(None), PROMPT
    for _ in range(5):
        out = text(runner, prompt, max_tokens=20)
        assert out.token_ids == text(plain, prompt, max_tokens=20).token_ids
        assert_drafter_follows(runner)
        policy = runner.block_policy
        assert isinstance(policy, AdaptiveBlock)
        prompt = [*PROMPT, *out.token_ids[:4]]
    assert runner.block_policy is policy


@pytest.mark.parametrize("kind", ["useless", "useless block"])
def test_a_drafter_that_loses_is_parked_and_the_result_says_so(kind: str) -> None:
    runner = make(kind)
    policy = AdaptiveBlock(4)
    for _ in range(3):
        policy.note_plain(1.0)
    for _ in range(20):
        policy.note_round(2, 0, 2.0)
    runner.block_policy = policy
    out = text(runner)
    assert (out.drafted, out.rounds) == (0, 0)
    assert out.draft_off_reason == policy.off_reason
    assert_drafter_follows(runner)


def test_results_count_what_was_drafted() -> None:
    out = text(make("alternating block"), draft_block=2, max_tokens=9)
    assert (out.rounds, out.rollbacks) == (4, 3)
    assert (out.drafted, out.accepted) == (7, 4)
    assert out.accepted_per_position == (4, 0)
    assert "4 of 7 drafted tokens kept" in out.summary()
    none = text(make(None))
    assert (none.drafted, none.accepted, none.accepted_per_position) == (0, 0, ())
    assert (none.rounds, none.rollbacks) == (0, 0)
    assert "drafted" not in none.summary()


def test_every_response_says_whether_its_token_was_drafted() -> None:
    flags = [
        response.from_draft for response in stream(make("perfect"), draft_block=3, max_tokens=9)
    ]
    assert flags == [False, True, True, True] * 2 + [False]


@pytest.mark.parametrize(
    ("runner", "given", "reason"),
    [
        (make(None), {}, "drafting is off"),
        (make("perfect"), {"draft": "off"}, "left out of this call"),
        (make("perfect"), {"draft_block": 2, "max_tokens": 1}, "no token has been proposed"),
        (make("ngram"), {"draft_block": 2, "max_tokens": 2}, "no token has been proposed"),
        (make("perfect", reach=4), {}, "can take back 4 tokens"),
    ],
    ids=["none", "call", "budget", "no match", "ring"],
)
def test_a_text_without_drafting_says_why(runner: Runner, given: Any, reason: str) -> None:
    out = text(runner, **given)
    assert out.drafted == 0
    assert reason in out.draft_off_reason


def test_a_drafter_with_a_reason_of_its_own_is_quoted() -> None:
    runner = make(None)
    runner = Runner(runner.model, runner.session, NoDrafter("the file has no mtp tensors"))
    assert text(runner).draft_off_reason == "the file has no mtp tensors"


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.05},
        {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 3},
        {"logprobs": 2, "stop": ["never"]},
        {"logits_processors": [lambda _, row: row], "logit_bias": {1: 1.0}},
        {"sampler": lambda _: 2},
    ],
    ids=["temperature", "truncated", "penalised", "seeded", "logprobs", "processors", "sampler"],
)
@pytest.mark.parametrize("kind", ["perfect", "perfect block"])
def test_no_usual_setting_switches_drafting_off(kind: str, given: Any) -> None:
    out = text(make(kind), draft_block=2, **given)
    assert out.drafted > 0
    assert out.draft_off_reason is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recurrent", [0, 1])
def test_the_same_seed_gives_the_same_text_cold_warm_and_without_a_drafter(
    kind: str, recurrent: int
) -> None:
    given: Any = {"temperature": 0.9, "seed": 12, "frequency_penalty": 0.3}
    expected = text(make(None), **given).token_ids
    runner = make(kind, recurrent=recurrent)
    cold = text(runner, draft_block=3, **given)
    warm = text(runner, draft_block=2, **given)
    adaptive = text(runner, **given)
    assert cold.token_ids == warm.token_ids == adaptive.token_ids == expected
    assert warm.reused_tokens == (0 if recurrent else warm.prompt_tokens - 1 - STEP_BACK[kind])


def test_without_a_seed_two_texts_differ() -> None:
    runner = make("perfect")
    texts = {tuple(text(runner, draft_block=3, temperature=1.5).token_ids) for _ in range(4)}
    assert len(texts) == 4


@pytest.mark.parametrize(
    ("runner", "block", "message"),
    [
        (make("perfect"), 9, "the scripted drafter takes at most 8"),
        (make("perfect", reach=4), 1, "can take back 4 tokens"),
        (make(None), 2, "draft_block=2: drafting is off"),
    ],
    ids=["drafter", "ring", "none"],
)
def test_a_block_that_cannot_be_had_is_refused_before_anything_moves(
    runner: Runner, block: int, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        stream(runner, draft_block=block)
    assert runner.session.position == 0


def test_a_ring_with_slack_enough_is_rolled_back() -> None:
    expected = text(make(None, reach=9), max_tokens=60).token_ids
    out = text(make("alternating", reach=9), max_tokens=60, draft_block=8)
    assert out.token_ids == expected
    assert out.rollbacks > 0


def test_a_call_that_drafts_after_one_that_did_not_is_not_off_its_cursor() -> None:
    runner = make("perfect")
    first = text(runner, draft="off")
    prompt = [*PROMPT, *first.token_ids, 3]
    second = text(runner, prompt, draft_block=3)
    assert second.reused_tokens == len(prompt) - 2
    assert second.accepted == second.drafted > 0
    assert_drafter_follows(runner)

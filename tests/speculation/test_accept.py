"""The rules of acceptance on single rows, enumerated exactly."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turbospark.errors import NonFiniteError
from turbospark.sampling.select import Chooser
from turbospark.sampling.uniform import ACCEPTANCE, RESIDUAL, TARGET
from turbospark.settings import GenerationConfig
from turbospark.speculation.accept import (
    MatchAcceptance,
    Proposal,
    RejectionAcceptance,
    choose_acceptance,
    keeps,
    residual,
)

VOCAB = 5
HISTORY, PROMPT_TOKENS = [3, 1, 4, 1], 2
TARGET_ROW = mx.array([0.5, 1.5, -0.3, 0.9, 0.0])
DRAFT_ROW = mx.array([1.2, 0.1, 0.4, -0.8, 0.6])
GRID = 1500


def chooser(more: dict[str, Any] | None = None, **options: Any) -> Chooser:
    return Chooser(GenerationConfig(**{"temperature": 0.7, **options}), VOCAB, **(more or {}))


class Numbers(Chooser):
    """Uses the numbers that a test sets."""

    numbers: dict[int, float]

    def uniform(self, step: int, stream: int = TARGET) -> float:
        assert step == len(HISTORY) - PROMPT_TOKENS
        return self.numbers[stream]


def emitted_law(options: dict[str, Any], draft_row: mx.array) -> np.ndarray[Any, Any]:
    """The law [V] of the token that one proposal ends in, over all chances there are."""
    source = Numbers(GenerationConfig(**{"temperature": 0.7, **options}), VOCAB)
    rule = RejectionAcceptance(source)
    source.numbers = {}
    draft = source.law(source.score(draft_row, HISTORY), HISTORY, PROMPT_TOKENS)
    total = np.zeros(VOCAB)
    for token, chance in zip(draft.ids.tolist(), draft.probabilities.tolist(), strict=True):
        proposal = Proposal(token, draft)

        def judge(acceptance: float, rest: float, proposal: Proposal = proposal) -> Any:
            source.numbers = {ACCEPTANCE: acceptance, RESIDUAL: rest}
            return rule.judge(TARGET_ROW, proposal, HISTORY, PROMPT_TOKENS)

        low, high = 0.0, 1.0  # it stays below some number and falls from there on
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if judge(middle, 0.0).kept else (low, middle)
        total[token] += chance * low
        if low > 1 - 1e-9:
            continue
        for rest in (np.arange(GRID) + 0.5) / GRID:
            verdict = judge(1 - 1e-12, float(rest))
            assert not verdict.kept
            total[verdict.choice.token] += chance * (1 - low) / GRID
    return total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.5},
        {"top_k": 3},
        {"top_p": 0.8, "min_p": 0.1},
        {"repetition_penalty": 1.4, "presence_penalty": 0.6},
    ],
    ids=str,
)
def test_what_one_proposal_ends_in_has_the_targets_law(options: dict[str, Any]) -> None:
    source = chooser(**options)
    law = source.law(source.score(TARGET_ROW, HISTORY), HISTORY, PROMPT_TOKENS)
    expected = law.probabilities_of(np.arange(VOCAB))
    assert np.abs(emitted_law(options, DRAFT_ROW) - expected).max() < 2e-3


def test_what_the_target_bans_never_stays_nor_takes_a_place() -> None:
    assert not keeps(0.0, 0.5, 0.0)
    assert not keeps(np.zeros(2), np.array([0.1, 1.0]), np.zeros(2)).any()
    law = emitted_law({"top_k": 2}, mx.array([0.0, -9.0, 9.0, -9.0, 0.0]))
    assert law[[0, 2, 4]].tolist() == [0, 0, 0]


def test_equal_probabilities_always_stay() -> None:
    assert keeps(0.25, 0.25, 1 - 2**-53)
    assert keeps(0.5, 0.25, 1 - 2**-53)


def test_a_residual_is_the_targets_mass_beyond_the_drafts() -> None:
    target, draft = np.array([[0.5, 0.3, 0.2]]), np.array([[0.2, 0.4, 0.4]])
    assert residual(target, draft).tolist() == [[0.3, 0.0, 0.0]]


def test_where_only_rounding_is_beyond_the_whole_target_replaces() -> None:
    target = np.array([0.5, 0.3, 0.2])
    assert residual(target, target + np.array([-1e-13, 1e-13, 0.0])).tolist() == target.tolist()
    mixed = residual(np.stack([target, target]), np.stack([target, target[::-1]]))
    assert mixed[0].tolist() == target.tolist()
    assert mixed[1].tolist() == pytest.approx([0.3, 0.0, 0.0])


def test_a_match_is_the_targets_own_choice_whatever_was_proposed() -> None:
    for options in ({"temperature": 0.0}, {"seed": 8}, {}):
        source = chooser(**options)
        rule = MatchAcceptance(source)
        own = source.choose(TARGET_ROW, HISTORY, PROMPT_TOKENS).token
        for token in range(VOCAB):
            verdict = rule.judge(TARGET_ROW, Proposal(token), HISTORY, PROMPT_TOKENS)
            assert verdict.choice.token == own
            assert verdict.kept is (token == own)


def test_a_match_proposes_what_the_target_would_choose() -> None:
    for options in ({"temperature": 0.0}, {"seed": 8}, {"seed": 9, "top_k": 2}):
        source = chooser({"logit_bias": {1: -3.0}}, **options)
        proposal = MatchAcceptance(source).propose(DRAFT_ROW, HISTORY, PROMPT_TOKENS)
        assert proposal.token == source.choose(DRAFT_ROW, HISTORY, PROMPT_TOKENS).token
        assert proposal.law is None


def test_a_match_asks_the_callers_sampler_about_the_targets_rows_alone() -> None:
    asked: list[int] = []

    def sampler(logprobs: mx.array) -> int:
        asked.append(1)
        return 2

    source = chooser({"sampler": sampler}, temperature=0.0)
    assert MatchAcceptance(source).propose(DRAFT_ROW, HISTORY, PROMPT_TOKENS).token == 0
    assert asked == []


def test_a_rejection_proposes_from_the_drafts_law_shaped_as_the_targets() -> None:
    source = chooser({"logit_bias": {0: -float("inf")}}, top_k=2)
    proposal = RejectionAcceptance(source).propose(DRAFT_ROW, HISTORY, PROMPT_TOKENS)
    assert proposal.law is not None
    assert proposal.law.ids.tolist() == [2, 4]
    assert proposal.token in (2, 4)


def test_verdicts_carry_the_targets_log_probabilities() -> None:
    source = chooser(logprobs=2)
    expected = np.array(TARGET_ROW - mx.logsumexp(TARGET_ROW))
    for rule in (MatchAcceptance(source), RejectionAcceptance(source)):
        proposal = rule.propose(DRAFT_ROW, HISTORY, PROMPT_TOKENS)
        choice = rule.judge(TARGET_ROW, proposal, HISTORY, PROMPT_TOKENS).choice
        assert choice.logprob == pytest.approx(expected[choice.token], abs=1e-6)
        assert [token for token, _ in choice.top_logprobs] == [1, 3]


@pytest.mark.parametrize("rule", [MatchAcceptance, RejectionAcceptance])
def test_a_drafters_row_that_is_not_finite_is_refused(rule: Any) -> None:
    with pytest.raises(NonFiniteError):
        rule(chooser()).propose(DRAFT_ROW * float("nan"), HISTORY, PROMPT_TOKENS)


@pytest.mark.parametrize(
    ("source", "block_passes", "rule"),
    [
        (chooser(), False, RejectionAcceptance),
        (chooser(), True, MatchAcceptance),
        (chooser(seed=1), False, MatchAcceptance),
        (chooser(temperature=0.0), False, MatchAcceptance),
        (chooser({"sampler": lambda _: 1}, temperature=0.0), False, MatchAcceptance),
        (chooser({"processors": [lambda _, row: row]}, top_p=0.9), False, RejectionAcceptance),
    ],
    ids=["drawn", "blocks", "seeded", "greedy", "sampler", "processors"],
)
def test_the_rule_follows_from_what_is_known_of_the_draft(
    source: Chooser, block_passes: bool, rule: Any
) -> None:
    assert type(choose_acceptance(source, block_passes=block_passes)) is rule

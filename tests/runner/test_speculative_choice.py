"""Processors, biases, samplers and log-probabilities under speculation."""

from typing import Any

import mlx.core as mx
import pytest
from runner.drafting import KINDS, PENALTIES, SAMPLED, Run, plain, speculator, tokens_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_every_token_carries_the_targets_logits_and_log_probabilities(
    kind: str, options: Any
) -> None:
    bias = {"logit_bias": {3: 2.5, 4: -2.0}}
    expected = plain(logprobs=4, more=bias, **options)
    steps = list(Run(speculator(kind), 3, logprobs=4, more=bias, **options).steps)
    for step, other in zip(steps, expected, strict=True):
        assert step.choice.logits.tolist() == other.choice.logits.tolist()
        assert step.choice.logprob == other.choice.logprob
        assert step.choice.top_logprobs == other.choice.top_logprobs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_processors_and_biases_rule_the_text_as_in_plain_decoding(kind: str, options: Any) -> None:
    def never_twice(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens[-1:]].add(-100.0)

    more = {"processors": [never_twice], "logit_bias": {2: 1.5}}
    text = tokens_of(plain(more=more, **options))
    assert text != tokens_of(plain(**options))
    assert Run(speculator(kind), 3, more=more, **options).tokens() == text


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_perfect_drafter_stays_perfect_under_processors_and_biases(options: Any) -> None:
    more = {
        "processors": [lambda tokens, logits: logits.at[:, tokens[-1:]].add(-100.0)],
        "logit_bias": {2: 1.5},
    }
    (*_, last) = Run(speculator("perfect"), 3, more=more, tokens=21, **options).steps
    assert last.drafts.accepted == last.drafts.drafted == 15


@pytest.mark.parametrize("kind", ["perfect block", "alternating block", "ngram"])
def test_processors_see_each_text_once_where_blocks_are_drafted(kind: str) -> None:
    def watched(seen: list[list[int]]) -> dict[str, Any]:
        def processor(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.tolist())
            return logits

        return {"processors": [processor]}

    here: list[list[int]] = []
    there: list[list[int]] = []
    Run(speculator(kind), 3, more=watched(here)).tokens()
    plain(more=watched(there))
    assert here == there


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_of_the_callers_is_asked_once_a_token(kind: str) -> None:
    def counting() -> Any:
        calls = iter(range(99))
        return lambda logprobs: int(mx.argmax(logprobs)) if next(calls) % 5 else 3

    text = tokens_of(plain(more={"sampler": counting()}))
    assert Run(speculator(kind), 4, more={"sampler": counting()}).tokens() == text


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.7}, {"temperature": 0.7, "seed": 1},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "min_p": 0.1}, {"logprobs": 3},
        {"temperature": 1.4, **PENALTIES}, {"more": {"logit_bias": {1: 1.0}}},
        {"more": {"processors": [lambda _, logits: logits]}}, {"more": {"sampler": lambda _: 1}},
        {"sink": {"stops": ["never"]}},
    ],
    ids=lambda options: str({k: list(v) if k == "more" else v for k, v in options.items()}),
)  # fmt: skip
@pytest.mark.parametrize("kind", ["perfect", "perfect block"])
def test_no_sampling_option_switches_drafting_off(kind: str, options: Any) -> None:
    (*_, last) = Run(speculator(kind), 2, **options).steps
    assert last.drafts.drafted > 0

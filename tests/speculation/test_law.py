"""Sampled speculation has the target's law, whatever the drafter; planted defects are seen."""

from typing import Any

import numpy as np
import pytest
from speculation.laws import DRAFTERS, VOCAB, Array, Sampler, exact, law, surprise, target_logits

from turbospark.sampling.uniform import ACCEPTANCE, PROPOSAL, TARGET, seeded_uniform
from turbospark.settings import GenerationConfig
from turbospark.speculation.accept import keeps

FAST, SLOW = 10_000, 100_000
LIMIT = 4.5  # standard deviations: once in 300,000
SHAPES: dict[str, dict[str, Any]] = {
    "alone": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    "all": {"top_k": 3, "top_p": 0.95, "min_p": 0.05, "frequency_penalty": 0.5},
}
SIZES = [FAST, pytest.param(SLOW, marks=pytest.mark.slow)]


def seeds(count: int) -> Array:
    return np.arange(count, dtype=np.uint64) + np.uint64(10**9)


def config(temperature: float = 1.0, **options: Any) -> GenerationConfig:
    return GenerationConfig(temperature=temperature, **options)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_have_the_targets_law_at_any_temperature(
    drafter: str, temperature: float, count: int
) -> None:
    options = config(temperature)
    texts = Sampler(DRAFTERS[drafter], options).texts(seeds(count))
    assert abs(surprise(texts, options)) < LIMIT


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_have_the_targets_law_however_it_is_shaped(
    drafter: str, shape: str, count: int
) -> None:
    options = config(0.7, **SHAPES[shape])
    texts = Sampler(DRAFTERS[drafter], options).texts(seeds(count))
    assert abs(surprise(texts, options)) < LIMIT


def test_the_target_as_its_own_drafter_keeps_everything() -> None:
    kept: list[Array] = []

    def watched(target: Array, draft: Array, uniform: Array) -> Array:
        kept.append(keeps(target, draft, uniform))
        return kept[-1]

    Sampler(target_logits, config(0.7, top_p=0.9), keeps=watched).texts(seeds(FAST))
    assert all(stays.all() for stays in kept)


def test_proposals_from_nowhere_are_all_replaced() -> None:
    options = config(top_k=3)
    texts = Sampler(DRAFTERS["disjoint"], options).texts(seeds(FAST))
    banned = [int(np.argmin(target_logits([token]))) for token in range(VOCAB)]
    assert not any((texts[:, 1] == banned[a])[texts[:, 0] == a].any() for a in range(VOCAB))


# What must be seen: each of these has been somebody's bug.


def shared(seeds: Array, step: int, stream: int) -> Array:
    """The first proposal is drawn with the number that the first token was drawn with."""
    return seeded_uniform(
        seeds, step - 1 if stream == PROPOSAL else step, TARGET if stream == PROPOSAL else stream
    )


def test_a_number_shared_by_the_first_token_and_the_first_proposal_is_seen() -> None:
    texts = Sampler(DRAFTERS["uniform"], config(0.7), uniforms=shared).texts(seeds(FAST))
    assert surprise(texts, config(0.7)) > 3 * LIMIT


def test_a_number_shared_by_proposal_and_acceptance_is_seen() -> None:
    def uniforms(seeds: Array, step: int, stream: int) -> Array:
        return seeded_uniform(seeds, step, PROPOSAL if stream == ACCEPTANCE else stream)

    texts = Sampler(DRAFTERS["uniform"], config(0.7), uniforms=uniforms).texts(seeds(FAST))
    assert surprise(texts, config(0.7)) > 3 * LIMIT


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.5])
def test_a_ratio_of_probabilities_at_temperature_1_is_seen(temperature: float) -> None:
    options = config(temperature)

    def at_temperature_1(target: Array, draft: Array, uniform: Array) -> Array:
        warm = target**temperature
        return keeps(warm / warm.mean() * target.mean(), draft, uniform)

    sampler = Sampler(DRAFTERS["uniform"], options, keeps=at_temperature_1)
    assert surprise(sampler.texts(seeds(FAST)), options) > 3 * LIMIT


def test_acceptance_by_equality_with_the_likeliest_is_seen() -> None:
    def greedy(target: Array, draft: Array, uniform: Array) -> Array:
        return target >= 0.5

    sampler = Sampler(DRAFTERS["uniform"], config(0.7), keeps=greedy)
    assert surprise(sampler.texts(seeds(FAST)), config(0.7)) > 3 * LIMIT


def test_a_replacement_from_the_whole_law_is_seen() -> None:
    sampler = Sampler(DRAFTERS["uniform"], config(0.7), residual=lambda target, _: target)
    assert surprise(sampler.texts(seeds(FAST)), config(0.7)) > 3 * LIMIT


def test_the_test_itself_is_quiet_on_the_law_and_loud_beside_it() -> None:
    options = config(0.7)
    flat = exact(options).reshape(-1)
    assert flat.sum() == pytest.approx(1.0)
    drawn = np.random.default_rng(3).choice(len(flat), size=FAST, p=flat)
    texts = np.stack(np.unravel_index(drawn, (VOCAB,) * 3), axis=-1)
    assert abs(surprise(texts, options)) < LIMIT
    assert surprise(texts, config(0.6)) > 3 * LIMIT
    assert law(target_logits, [1], options).sum() == pytest.approx(1.0)

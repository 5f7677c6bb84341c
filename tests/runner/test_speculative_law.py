"""The real loop, generation by generation: the law of its texts, and how it draws them."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from runner.drafting import Run
from speculation.laws import (
    DRAFTERS,
    LENGTH,
    PROMPT,
    VOCAB,
    LogitsOf,
    Sampler,
    surprise,
    target_logits,
)

from turbospark.settings import GenerationConfig
from turbospark.testing import ScriptedSpeculator

LIMIT = 4.5


class Speculator(ScriptedSpeculator):
    """Drafts by a law of its own, step by step."""

    def __init__(self, draft: LogitsOf) -> None:
        super().__init__(target_logits)
        self.draft = draft

    def draft_step(self, token: int, position: int) -> mx.array:
        super().draft_step(token, position)
        return mx.array(self.draft([token]).astype(np.float32))


def texts(draft: LogitsOf, count: int, block: int, **options: Any) -> np.ndarray[Any, Any]:
    out = np.zeros((count, LENGTH), dtype=np.int64)
    for index in range(count):
        producer = Speculator(draft)
        run = Run(producer, block, prompt=PROMPT, tokens=LENGTH + 1, vocab=VOCAB, **options)
        run.chooser.seed = 5 * 10**8 + index  # a seed among the options would ask for a match
        out[index] = run.tokens()[:LENGTH]
    return out


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_loop_draws_the_very_texts_of_the_enumerated_rules(drafter: str) -> None:
    options = {"temperature": 0.7, "top_k": 3, "presence_penalty": 0.37}
    seeds = np.arange(150, dtype=np.uint64) + np.uint64(5 * 10**8)
    expected = Sampler(DRAFTERS[drafter], GenerationConfig(**options)).texts(seeds)
    assert texts(DRAFTERS[drafter], 150, 2, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("count", [600, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("drafter", "block"), [("target", 3), ("uniform", 1), ("uniform", 3)])
def test_texts_of_the_loop_have_the_targets_law(drafter: str, block: int, count: int) -> None:
    drawn = texts(DRAFTERS[drafter], count, block, temperature=0.7)
    assert abs(surprise(drawn, GenerationConfig(temperature=0.7))) < LIMIT


@pytest.mark.parametrize("count", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_texts_of_a_block_drafter_have_the_targets_law(count: int) -> None:
    out = np.zeros((count, LENGTH), dtype=np.int64)
    for index in range(count):
        producer = ScriptedSpeculator(target_logits, "alternating", block_passes=True)
        run = Run(
            producer, 2, prompt=PROMPT, tokens=LENGTH, vocab=VOCAB, temperature=0.7, seed=index
        )
        out[index] = run.tokens()
    assert abs(surprise(out, GenerationConfig(temperature=0.7))) < LIMIT


def test_a_drafter_that_knows_the_law_is_accepted_far_more_often_than_by_chance() -> None:
    accepted = drafted = 0
    for index in range(100):
        run = Run(
            Speculator(target_logits), 3, prompt=PROMPT, tokens=12, vocab=VOCAB, temperature=1.0
        )
        run.chooser.seed = index
        (*_, last) = run.steps
        accepted, drafted = accepted + last.drafts.accepted, drafted + last.drafts.drafted
    assert accepted == drafted

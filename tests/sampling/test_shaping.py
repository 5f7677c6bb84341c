"""Each stage of shaping, and their order."""

from typing import Any

import numpy as np
import pytest

from turbospark.sampling.shaping import Distribution, log_softmax, penalise, shaped, survivors
from turbospark.settings import GenerationConfig


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities))


def test_repetition_penalty_counts_each_token_once_and_keeps_its_sign() -> None:
    scores = np.array([2.0, -2.0, 1.0])
    out = penalise(scores, [0, 0, 1], [], GenerationConfig(repetition_penalty=2.0))
    assert out.tolist() == [1.0, -4.0, 1.0]
    assert scores.tolist() == [2.0, -2.0, 1.0]


def test_presence_and_frequency_leave_the_prompt_out() -> None:
    config = GenerationConfig(presence_penalty=0.5, frequency_penalty=0.25)
    out = penalise(np.zeros(4), [3, 3, 1, 1, 2], [1, 1, 2], config)
    assert out.tolist() == [0.0, -1.0, -0.75, 0.0]


def test_top_p_keeps_the_token_that_crosses() -> None:
    scores = logs(0.1, 0.4, 0.3, 0.2)
    assert survivors(scores, GenerationConfig(top_p=0.65)).tolist() == [1, 2]
    assert survivors(scores, GenerationConfig(top_p=0.75)).tolist() == [1, 2, 3]


def test_top_p_counts_the_full_distribution_before_top_k() -> None:
    scores = logs(0.5, 0.3, 0.2)
    # Within the two of top-k 0.5 would be 0.625 of the mass and suffice for 0.6; it does not here.
    assert survivors(scores, GenerationConfig(top_p=0.6, top_k=2)).tolist() == [0, 1]


def test_top_k_prefers_the_lower_index_among_equals() -> None:
    assert survivors(np.array([1.0, 2.0, 1.0, 1.0]), GenerationConfig(top_k=2)).tolist() == [0, 1]


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert survivors(np.zeros(3), GenerationConfig(top_k=200)).tolist() == [0, 1, 2]


def test_min_p_is_measured_against_the_likeliest_at_temperature_1() -> None:
    scores = logs(0.5, 0.26, 0.24)
    assert survivors(scores, GenerationConfig(min_p=0.5, temperature=0.1)).tolist() == [0, 1]


def test_banned_tokens_never_survive() -> None:
    scores = np.array([0.0, -np.inf, 1.0])
    assert survivors(scores, GenerationConfig(top_p=0.999999)).tolist() == [0, 2]


def law(scores: np.ndarray, **options: Any) -> Distribution:
    return shaped(scores, [], [], GenerationConfig(**{"temperature": 1.0, **options}))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.49, 1), (0.51, 2), (0.81, 0)])
def test_draw_inverts_the_sum_in_ranked_order(uniform: float, token: int) -> None:
    assert law(logs(0.2, 0.5, 0.3)).draw(uniform) == token


def test_temperature_comes_last_and_reshapes_only_survivors() -> None:
    # At temperature 0.5 the two survivors weigh 0.36 and 0.09.
    shape = law(logs(0.6, 0.3, 0.1), top_k=2, temperature=0.5)
    assert shape.draw(0.79) == 0
    assert shape.draw(0.81) == 1
    assert shape.probabilities.tolist() == pytest.approx([0.8, 0.2])


def test_a_tiny_temperature_takes_the_likeliest_without_underflow() -> None:
    assert law(logs(0.4, 0.6), temperature=1e-4).draw(0.999) == 1


def test_temperature_0_is_all_on_the_first_of_the_best_whatever_else_is_set() -> None:
    config = GenerationConfig(repetition_penalty=9.0, presence_penalty=2.0)
    shape = shaped(np.array([1.0, 2.0, 2.0]), [1, 1], [1], config)
    assert (shape.ids.tolist(), shape.probabilities.tolist()) == ([1], [1.0])
    assert shape.draw(0.999) == 1


def test_draw_follows_the_law() -> None:
    shape = law(logs(0.1, 0.2, 0.3, 0.4), temperature=0.7)
    uniforms = np.random.default_rng(7).random(20_000)
    counts = np.bincount([shape.draw(u) for u in uniforms], minlength=4)
    expected = shape.probabilities * len(uniforms)
    # Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


def test_probabilities_are_asked_for_by_token_and_are_0_outside_the_candidates() -> None:
    shape = law(logs(0.05, 0.5, 0.15, 0.3), top_k=2)
    assert shape.ids.tolist() == [1, 3]
    assert [shape.probability(token) for token in range(5)] == pytest.approx(
        [0, 0.625, 0, 0.375, 0]
    )
    assert shape.probabilities_of(np.array([0, 1, 3, 4])) == pytest.approx([0, 0.625, 0.375, 0])


def test_other_weights_keep_the_order_and_drop_what_weighs_nothing() -> None:
    shape = law(logs(0.5, 0.2, 0.3)).reweighted(np.array([0.0, 1.0, 3.0]))
    assert [shape.draw(uniform) for uniform in (0.0, 0.74, 0.76, 1.0)] == [2, 2, 1, 1]
    assert shape.ids.tolist() == [1, 2]


def test_every_penalty_reaches_the_law() -> None:
    config = GenerationConfig(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0)
    shape = shaped(np.array([2.0, 2.0, 2.0]), [0, 1], [1], config)
    expected = np.exp([1.0, 0.0, 2.0])
    assert shape.probabilities.tolist() == pytest.approx((expected / expected.sum()).tolist())


def test_log_softmax_sums_to_one() -> None:
    assert np.exp(log_softmax(np.array([1000.0, 999.0, 3.0]))).sum() == pytest.approx(1.0)

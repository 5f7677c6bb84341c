"""Ranked prefixes equal those of a full sort."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbospark.sampling import ranking
from turbospark.sampling.ranking import best, crossing, up_to

SCORES = st.lists(st.integers(-4, 4), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float64)
)


def ranked(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, kind="stable")


@given(SCORES, st.integers(1, 45))
def test_best_is_the_head_of_the_ranking(scores: np.ndarray, count: int) -> None:
    kept = best(scores, np.arange(len(scores)), count)
    assert kept.tolist() == sorted(ranked(scores)[:count].tolist())


@given(SCORES, st.data())
def test_up_to_keeps_what_is_ranked_no_lower(scores: np.ndarray, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(scores) - 1))
    order = ranked(scores)
    kept = up_to(scores, np.arange(len(scores)), int(order[place]))
    assert kept.tolist() == sorted(order[: place + 1].tolist())


@given(SCORES, st.integers(0, 60), st.booleans())
def test_crossing_equals_a_sorted_sum_however_the_set_is_halved(
    scores: np.ndarray, target: int, beyond: bool
) -> None:
    weights = np.abs(scores)  # whole numbers: sums are exact in any order
    order = ranked(scores)
    sums = np.cumsum(weights[order])
    crossed = np.flatnonzero(sums > target if beyond else sums >= target)
    expected = order[crossed[0]] if len(crossed) else order[-1]
    everything = np.arange(len(scores))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "_SORTED_AT_ONCE", 2)
        assert crossing(scores, weights, everything, target, beyond=beyond) == expected
    assert crossing(scores, weights, everything, target, beyond=beyond) == expected


def test_a_large_vocabulary_is_never_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(3).normal(size=100_003)
    lengths: list[int] = []
    argsort = np.argsort

    def watched(values: np.ndarray, **options: str) -> np.ndarray:
        lengths.append(len(values))
        return argsort(values, **options)

    monkeypatch.setattr(np, "argsort", watched)
    weights = np.exp(scores)
    for share in (0.01, 0.5, 0.99, 1.0):
        crossing(scores, weights, np.arange(len(scores)), share * weights.sum(), beyond=False)
    assert len(lengths) == 4
    assert max(lengths) <= 256

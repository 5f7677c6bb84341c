"""Many speculative generations at once: arrays of seeds through the real rules.

A toy of four tokens: the target's logits and the drafter's hang on the token before. A round of
two proposals follows the first token, so that a text of three tokens sees every branch: both
stay, the second is replaced, the first is replaced and the next round proposes anew.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbospark.sampling.shaping import shaped
from turbospark.sampling.uniform import ACCEPTANCE, PROPOSAL, RESIDUAL, TARGET, seeded_uniform
from turbospark.settings import GenerationConfig
from turbospark.speculation.accept import keeps, residual

VOCAB = 4
PROMPT = [2]
LENGTH = 3
Array = NDArray[Any]
LogitsOf = Callable[[Sequence[int]], Array]
Uniforms = Callable[[Array, int, int], Array]


def target_logits(ids: Sequence[int]) -> Array:
    return np.array(
        [[0.3, 1.1, -0.4, 0.0], [1.4, -0.2, 0.5, 0.1], [0.0, 0.2, 0.9, -1.5], [-0.3, 0.8, 0.1, 1.0]]
    )[ids[-1]]


def uniform_logits(ids: Sequence[int]) -> Array:
    return np.zeros(VOCAB)


def point_logits(ids: Sequence[int]) -> Array:
    return np.array([0.0, 60.0, 0.0, 0.0])


def disjoint_logits(ids: Sequence[int]) -> Array:
    """Nothing but what the target all but never says."""
    row = np.full(VOCAB, -60.0)
    row[np.argmin(target_logits(ids))] = 60.0
    return row


DRAFTERS: dict[str, LogitsOf] = {
    "target": target_logits,
    "uniform": uniform_logits,
    "point": point_logits,
    "disjoint": disjoint_logits,
}


def law(logits_of: LogitsOf, ids: Sequence[int], config: GenerationConfig) -> Array:
    """Probabilities [V] of the token after `ids`, through the real shaping."""
    history = [*PROMPT, *ids]
    return shaped(logits_of(history), history, ids, config).probabilities_of(np.arange(VOCAB))


def inverse(weights: Array, uniform: Array, rank: Array) -> Array:
    """The index [N] at which weights [N, V], added up by descending rank, pass uniform [N]."""
    order = np.argsort(-rank, axis=-1, kind="stable")
    sums = np.cumsum(np.take_along_axis(weights, order, -1), axis=-1)
    place = np.argmax(sums > (uniform * sums[:, -1])[:, None], axis=-1)
    return np.take_along_axis(order, place[:, None], -1)[:, 0]


@dataclass
class Sampler:
    """Draws many texts.

    Attributes:
        draft: the drafter's logits.
        config: shapes both laws.
        uniforms: the numbers; a test may plant a defect here.
        keeps: the rule; and here.
        residual: what replaces; and here.
    """

    draft: LogitsOf
    config: GenerationConfig
    uniforms: Uniforms = seeded_uniform
    keeps: Callable[..., Array] = keeps
    residual: Callable[..., Array] = residual

    def texts(self, seeds: Array) -> Array:
        """Texts [N, LENGTH] of seeds [N]."""
        out = np.zeros((len(seeds), LENGTH), dtype=np.int64)
        out[:, 0] = self._draw(self._laws(target_logits, out, 0), seeds, 0, TARGET)
        kept = self._round(out, seeds, 1)
        # Where the first proposal fell, what followed it was never looked at: propose it anew.
        again = np.flatnonzero(~kept)
        if len(again):
            part = out[again]
            self._round(part, seeds[again], 2)
            out[again] = part
        return out

    def _round(self, out: Array, seeds: Array, start: int) -> Array:
        """Fill `out` from place `start` on; whether the first proposal stayed."""
        going = np.ones(len(seeds), dtype=bool)
        first = going
        for place in range(start, LENGTH):
            target, draft = (
                self._laws(target_logits, out, place),
                self._laws(self.draft, out, place),
            )
            rows = np.arange(len(seeds))
            token = self._draw(draft, seeds, place, PROPOSAL)
            chance = self.uniforms(seeds, place, ACCEPTANCE)
            stays = self.keeps(target[rows, token], draft[rows, token], chance)
            rest, chance = self.residual(target, draft), self.uniforms(seeds, place, RESIDUAL)
            instead = inverse(rest, chance, target)
            out[going, place] = np.where(stays, token, instead)[going]
            going = going & stays
            first = stays if place == start else first
        return first

    def _draw(self, weights: Array, seeds: Array, place: int, stream: int) -> Array:
        return inverse(weights, self.uniforms(seeds, place, stream), weights)

    def _laws(self, logits_of: LogitsOf, out: Array, place: int) -> Array:
        """Laws [N, V] of the token at `place`; shaped once for each text before it."""
        texts = itertools.product(range(VOCAB), repeat=place)
        laws = np.array([law(logits_of, text, self.config) for text in texts])
        return laws[out[:, :place] @ VOCAB ** np.arange(place)[::-1]]


def exact(config: GenerationConfig) -> Array:
    """Probabilities [V, V, V] of the target's own texts."""
    probabilities = np.zeros((VOCAB,) * LENGTH)
    for a in range(VOCAB):
        for b in range(VOCAB):
            chance = law(target_logits, [], config)[a] * law(target_logits, [a], config)[b]
            probabilities[a, b] = chance * law(target_logits, [a, b], config)
    return probabilities


def surprise(texts: Array, config: GenerationConfig) -> float:
    """Chi-square of texts against the target's law, over the texts it can say, as a z score.

    One it cannot say is infinitely surprising. Cells that expect under 5 are taken together.
    """
    counts = np.zeros((VOCAB,) * LENGTH)
    np.add.at(counts, tuple(texts.T), 1)
    expected = exact(config) * len(texts)
    if counts[expected == 0].any():
        return float("inf")
    rare = (expected < 5) & (expected > 0)
    seen, due = counts[expected >= 5], expected[expected >= 5]
    if expected[rare].sum() >= 5:
        seen, due = np.append(seen, counts[rare].sum()), np.append(due, expected[rare].sum())
    freedom = len(due) - 1
    if freedom == 0:
        return 0.0
    statistic = float(((seen - due) ** 2 / due).sum())
    # Wilson and Hilferty: the cube root of chi-square over its mean is all but normal.
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5

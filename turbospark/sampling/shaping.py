"""From logits to the distribution a token is drawn from, in float64 and in one fixed order.

Order: repetition penalty, presence and frequency penalties, softmax at temperature 1, top-p over
the full distribution, top-k, min-p, temperature, draw in ranked order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turbospark.sampling.ranking import Indices, Scores, best, crossing, up_to
from turbospark.settings import GenerationConfig


def penalise(
    scores: Scores, history: Sequence[int], generated: Sequence[int], config: GenerationConfig
) -> Scores:
    """Apply the three penalties.

    Args:
        scores: [V]; left as they are.
        history: prompt and generated tokens, for the repetition penalty.
        generated: generated tokens alone, for the presence and frequency penalties.
        config: where the penalties stand.

    Returns:
        new scores [V], or the same array where no penalty is on.
    """
    repetition = config.repetition_penalty
    presence, frequency = config.presence_penalty, config.frequency_penalty
    if repetition == 1.0 and presence == 0.0 and frequency == 0.0:
        return scores
    scores = scores.copy()
    if repetition != 1.0 and len(history):
        seen = np.unique(np.array(history, dtype=np.int64))
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / repetition, old * repetition)
    if (presence != 0.0 or frequency != 0.0) and len(generated):
        seen, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        scores[seen] -= presence + frequency * counts
    return scores


def survivors(scores: Scores, config: GenerationConfig) -> Indices:
    """The tokens that top-p, top-k and min-p leave, in ascending order; never none."""
    kept = np.flatnonzero(scores > -np.inf)
    top = scores.max()
    if config.top_p is not None and config.top_p < 1.0:
        mass = np.exp(scores - top)
        last = crossing(scores, mass, kept, config.top_p * float(mass.sum()), beyond=False)
        kept = up_to(scores, kept, last)
    if config.top_k:
        kept = best(scores, kept, config.top_k)
    if config.min_p > 0.0:
        kept = kept[np.exp(scores[kept] - top) >= config.min_p]
    return kept


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """The tokens that may follow and how likely each is.

    Attributes:
        ids: [n] the candidates in ascending order.
        scores: [n] what ranks them.
        weights: [n] their probabilities times `total`, float64.
        total: the sum of the weights.
    """

    ids: Indices
    scores: Scores
    weights: Scores
    total: float

    @property
    def probabilities(self) -> Scores:
        """[n] what the candidates are drawn with; they sum to 1."""
        return self.weights / self.total

    def probability(self, token: int) -> float:
        """How likely a token is; 0 for one that is no candidate."""
        place = int(np.searchsorted(self.ids, token))
        known = place < len(self.ids) and self.ids[place] == token
        return float(self.weights[place]) / self.total if known else 0.0

    def probabilities_of(self, ids: Indices) -> Scores:
        """The same for an array of tokens [m]."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.weights[places] / self.total, 0.0)

    def reweighted(self, weights: Scores) -> "Distribution":
        """The same ranking under other weights [n], not all of them 0; those of 0 drop out."""
        left = np.flatnonzero(weights > 0.0)
        weights = weights[left]
        return Distribution(self.ids[left], self.scores[left], weights, float(weights.sum()))

    def draw(self, uniform: float) -> int:
        """The candidate at which the weights, added up in ranked order, pass `uniform` of all.

        Args:
            uniform: in [0, 1).
        """
        everyone = np.arange(len(self.ids))
        place = crossing(self.scores, self.weights, everyone, uniform * self.total, beyond=True)
        return int(self.ids[place])


def shaped(
    scores: Scores, history: Sequence[int], generated: Sequence[int], config: GenerationConfig
) -> Distribution:
    """What the next token is drawn from, every stage applied.

    Args:
        scores: [V]; left as they are.
        history: prompt and generated tokens.
        generated: generated tokens alone.
        config: where the stages stand. At temperature 0 all of it goes to the best token, the
            first of equals, and nothing else counts.
    """
    if config.temperature == 0.0:
        winner = np.array([np.argmax(scores)])
        return Distribution(winner, scores[winner], np.ones(1), 1.0)
    penalised = penalise(scores, history, generated, config)
    kept = survivors(penalised, config)
    ranked = penalised[kept]
    # With the top score taken off first the largest weight is 1 at any temperature; at the
    # smallest ones the others are -inf before `exp`, which is right.
    with np.errstate(over="ignore"):
        weights = np.exp((ranked - ranked.max()) / config.temperature)
    return Distribution(kept, ranked, weights, float(weights.sum()))


def log_softmax(scores: Scores) -> Scores:
    """Log-probabilities [V] at temperature 1."""
    shifted = scores - scores.max()
    return shifted - np.log(np.exp(shifted).sum())

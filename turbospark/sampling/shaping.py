"""From logits to the distribution a token is drawn from, in float64 and in one fixed order.

Order: repetition penalty, presence and frequency penalties, softmax at temperature 1, top-p over
the full distribution, top-k, min-p, temperature, draw in ranked order.
"""

from collections.abc import Sequence

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


def draw(scores: Scores, kept: Indices, temperature: float, uniform: float) -> int:
    """Draw one of `kept` with weight probability ** (1 / temperature).

    Args:
        scores: [V].
        kept: the survivors.
        temperature: above 0.
        uniform: in [0, 1); where it falls on the weights added up in ranked order decides.
    """
    weights = np.zeros_like(scores)
    # With the top score taken off first the largest weight is 1 at any temperature; at the
    # smallest ones the others are -inf before `exp`, which is right.
    with np.errstate(over="ignore"):
        weights[kept] = np.exp((scores[kept] - scores[kept].max()) / temperature)
    return crossing(scores, weights, kept, uniform * float(weights[kept].sum()), beyond=True)


def log_softmax(scores: Scores) -> Scores:
    """Log-probabilities [V] at temperature 1."""
    shifted = scores - scores.max()
    return shifted - np.log(np.exp(shifted).sum())

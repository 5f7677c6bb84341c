"""Ranked prefixes of a vocabulary without ever sorting it.

Ranked means by descending score, the lower index first among equals. Sets of candidates are
index arrays in ascending order.
"""

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Indices = NDArray[np.intp]

_SORTED_AT_ONCE = 256


def best(scores: Scores, candidates: Indices, count: int) -> Indices:
    """The `count` best ranked candidates, in ascending order of index."""
    if count >= len(candidates):
        return candidates
    values = scores[candidates]
    pivot = np.partition(values, len(values) - count)[len(values) - count]
    above = values > pivot
    ties = np.flatnonzero(values == pivot)[: count - int(above.sum())]
    above[ties] = True
    return candidates[above]


def up_to(scores: Scores, candidates: Indices, last: int) -> Indices:
    """The candidates ranked no lower than the index `last`, itself included."""
    values = scores[candidates]
    pivot = scores[last]
    return candidates[(values > pivot) | ((values == pivot) & (candidates <= last))]


def crossing(
    scores: Scores, weights: Scores, candidates: Indices, target: float, *, beyond: bool
) -> int:
    """The candidate at which the weights, added up in ranked order, cross `target`.

    The set is halved around a pivot until few enough are left to sort.

    Args:
        scores: [V] what ranks.
        weights: [V] what is added up; zero or more.
        candidates: at least one index.
        target: the mass to reach.
        beyond: whether the sum has to exceed the target rather than reach it.

    Returns:
        the index that crosses; the last ranked one if none does.
    """
    base = 0.0
    while len(candidates) > _SORTED_AT_ONCE:
        values = scores[candidates]
        middle = len(values) // 2
        pivot = np.partition(values, middle)[middle]
        above, equal = candidates[values > pivot], candidates[values == pivot]
        mass = base + float(weights[above].sum())
        if len(above) and _crosses(mass, target, beyond):
            candidates = above
            continue
        both = mass + float(weights[equal].sum())
        below = candidates[values < pivot]
        if not len(below) or _crosses(both, target, beyond):
            candidates, base = equal, mass
            break
        candidates, base = below, both
    order = candidates[np.argsort(-scores[candidates], kind="stable")]
    sums = base + np.cumsum(weights[order])
    place = int(np.searchsorted(sums, target, side="right" if beyond else "left"))
    return int(order[min(place, len(order) - 1)])


def _crosses(mass: float, target: float, beyond: bool) -> bool:
    return mass > target if beyond else mass >= target

"""What a round costs and what it brings, from what was seen of late."""

from collections import deque
from statistics import median

_LAST = 9  # times that are kept of each block
_LEAST_SECONDS = 1e-9  # a clock may not see a step pass
_GUESSED_SLOPE = 0.1  # of a plain step, for a proposal more, while nothing is known
_MEMORY = 15 / 16  # what a round leaves of the weight of those before it
_PRIOR_TRIALS = 2.0
_PRIOR_RATE = 0.75


class RoundCosts:
    """Seconds of rounds by the number of proposals; 0 of them is a plain step.

    The first time of each is left out: it pays for compiling and for first touches.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}

    def note(self, block: int, seconds: float) -> None:
        """Take the time of one round."""
        if block in self._times:
            self._times[block].append(max(seconds, _LEAST_SECONDS))
        else:
            self._times[block] = deque(maxlen=_LAST)

    def known(self, block: int) -> bool:
        """Whether such a round has been timed."""
        return bool(self._times.get(block))

    def of(self, block: int) -> float:
        """Seconds of such a round: the median, or a straight line between its neighbours.

        A plain step must be known.
        """
        if self.known(block):
            return median(self._times[block])
        timed = sorted(size for size in self._times if self.known(size))
        below = max(size for size in timed if size < block)
        above = min((size for size in timed if size > block), default=None)
        base = median(self._times[below])
        if above is not None:
            share = (block - below) / (above - below)
            return base + share * (median(self._times[above]) - base)
        plain = median(self._times[0])
        slope = (base - plain) / below if below else _GUESSED_SLOPE * plain
        return base + max(slope, 0.0) * (block - below)


class AcceptanceRates:
    """How often the proposal at each place stays once all before it did.

    Args:
        most: places.
    """

    def __init__(self, most: int) -> None:
        self._trials = [_PRIOR_TRIALS] * most
        self._kept = [_PRIOR_TRIALS * _PRIOR_RATE] * most

    def note(self, drafted: int, accepted: int) -> None:
        """Take one round: places up to the first that did not stay were looked at."""
        for place in range(min(drafted, accepted + 1, len(self._trials))):
            self._trials[place] = self._trials[place] * _MEMORY + 1.0
            self._kept[place] = self._kept[place] * _MEMORY + (place < accepted)

    def fade(self, share: float) -> None:
        """Leave what was seen so far only this share of its weight."""
        self._trials = [value * share for value in self._trials]
        self._kept = [value * share for value in self._kept]

    def tokens(self, block: int) -> float:
        """Tokens that a round of so many proposals is expected to give, its own one included."""
        total = chance = 1.0
        for place in range(block):
            chance *= self._kept[place] / self._trials[place]
            total += chance
        return total

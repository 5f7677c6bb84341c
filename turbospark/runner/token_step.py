"""One generated token on its way out of a loop, and the loop's own time."""

import time
from dataclasses import dataclass

from turbospark.runner.sink import Committed
from turbospark.sampling.select import Choice
from turbospark.speculation.statistics import DraftStatistics

NOTHING_DRAFTED = DraftStatistics()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One generated token.

    Attributes:
        committed: what the sink made of it.
        choice: how it was chosen.
        seconds: time the loop spent on it; the consumer's own time does not count.
        from_draft: whether a drafter proposed it.
        drafts: what came of drafting so far.
    """

    committed: Committed
    choice: Choice
    seconds: float
    from_draft: bool = False
    drafts: DraftStatistics = NOTHING_DRAFTED


class Stopwatch:
    """Adds up a loop's own time; it stands still while the consumer has the turn."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds that ran, of a watch that runs."""
        return self._spent + time.perf_counter() - self._since

    def pause(self) -> float:
        """Stand still; return the seconds since it was last made to run."""
        piece = time.perf_counter() - self._since
        self._spent += piece
        return piece

    def resume(self) -> None:
        """Run again."""
        self._since = time.perf_counter()

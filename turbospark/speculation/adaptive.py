"""How many tokens are worth proposing: a controller that never loses much.

It looks at committed tokens and measured times alone and changes no token: it decides which
passes compute the text, not what the text is.
"""

from typing import Protocol

from turbospark.errors import OptionError
from turbospark.speculation.costs import AcceptanceRates, RoundCosts

FLOOR = 0.97  # of the speed of plain decoding, by measured costs
CREDIT = 4.0  # plain steps that may be lost before anything was won

_RESERVE = 2.0  # of the credit, for rounds that cost more than was guessed
_FIRST_BLOCK = 2
_HOLD = 8  # rounds before a block that wins is exchanged for a better one
_MARGIN = 1.02
_REFRESH = 64  # rounds after which a plain step is timed anew
_FIRST_WAIT = 64  # tokens from parking to the first probe; twice as many after each lost one
_PROBE_ROUNDS = 3
_PROBE_FADE = 0.25
MOST_LOST_PROBES = 5


class BlockPolicy(Protocol):
    """Decides before every pass how many proposals are wanted."""

    @property
    def off_reason(self) -> str | None:
        """Why none are wanted now; None where some are."""
        ...

    def begin(self) -> None:
        """A generation begins."""
        ...

    def choose(self) -> int:
        """Proposals wanted for the next pass; 0 for a plain step."""
        ...

    def note_plain(self, seconds: float) -> None:
        """A plain step took so long."""
        ...

    def note_round(self, drafted: int, accepted: int, seconds: float) -> None:
        """A round of `drafted` proposals kept `accepted` of them and took so long."""
        ...


class FixedBlock:
    """Always the same number of proposals.

    Args:
        block: at least 1.
    """

    off_reason: str | None = None

    def __init__(self, block: int) -> None:
        if block < 1:
            raise OptionError(f"draft_block={block}: a round proposes at least 1 token")
        self.block = block

    def begin(self) -> None:
        """Nothing changes."""

    def choose(self) -> int:
        """The number given."""
        return self.block

    def note_plain(self, seconds: float) -> None:
        """Times do not matter."""

    def note_round(self, drafted: int, accepted: int, seconds: float) -> None:
        """Neither do outcomes."""


class AdaptiveBlock:
    """The number of proposals that gives most tokens a second, or none.

    A drafter that loses is parked. Parked, it is probed with a few rounds now and then, after
    ever longer waits, and after `MOST_LOST_PROBES` lost ones in a row no more in that generation.
    A ledger bounds what all of it may cost: no round begins that could take the whole below
    `FLOOR` of plain decoding, `CREDIT` steps apart.

    Args:
        most: proposals of a round at most, at least 1.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise OptionError(f"a drafter of {most} proposals a round has nothing to adapt")
        self._most = most
        self._costs = RoundCosts()
        self._rates = AcceptanceRates(most)
        self._block = min(_FIRST_BLOCK, most)
        self._held = 0
        self._since_plain = 0
        self._tokens = 0  # given
        self._steps = 0.0  # plain steps that their time would have been worth
        self._parked = False
        self._probe_rounds = 0
        self._lost_probes = 0
        self._probe_at = 0

    @property
    def off_reason(self) -> str | None:
        """That it is parked, where it is."""
        if not self._parked:
            return None
        return "drafting is parked: by the times measured it is slower than plain decoding"

    def begin(self) -> None:
        """Allow another probe where there were too many."""
        self._lost_probes = min(self._lost_probes, MOST_LOST_PROBES - 1)

    def choose(self) -> int:
        """The present block; 0 while parked, without credit, or where a plain time is wanted."""
        if not self._costs.known(0) or self._since_plain >= _REFRESH:
            return 0
        if self._parked and not self._probe_rounds:
            if self._tokens < self._probe_at or self._lost_probes >= MOST_LOST_PROBES:
                return 0
            self._begin_probe()
        return self._block if self._affordable(self._block) else 0

    def note_plain(self, seconds: float) -> None:
        """Take the time that speed is measured against."""
        self._costs.note(0, seconds)
        self._since_plain = 0
        self._tokens += 1
        self._steps += 1.0

    def note_round(self, drafted: int, accepted: int, seconds: float) -> None:
        """Take an outcome, and decide anew."""
        self._costs.note(drafted, seconds)
        self._rates.note(drafted, accepted)
        self._since_plain += 1
        self._held += 1
        self._tokens += accepted + 1
        self._steps += self._price(drafted)
        if self._probe_rounds:
            self._probe_rounds -= 1
            if not self._probe_rounds:
                self._end_probe()
        else:
            self._adapt()

    def _adapt(self) -> None:
        best = max(range(self._most + 1), key=self._speed)  # the smallest of equals
        if self._speed(self._block) <= self._speed(0):
            if best == 0:
                self._park(_FIRST_WAIT)
            else:
                self._take(best)
        elif self._held >= _HOLD and self._speed(best) > _MARGIN * self._speed(self._block):
            self._take(best)

    def _begin_probe(self) -> None:
        self._probe_rounds = _PROBE_ROUNDS
        self._rates.fade(_PROBE_FADE)
        self._take(max(range(1, min(_FIRST_BLOCK, self._most) + 1), key=self._speed))

    def _end_probe(self) -> None:
        if self._speed(self._block) > self._speed(0):
            self._parked, self._lost_probes = False, 0
            return
        self._lost_probes += 1
        self._park(_FIRST_WAIT << self._lost_probes)

    def _park(self, wait: int) -> None:
        self._parked = True
        self._probe_at = self._tokens + wait

    def _take(self, block: int) -> None:
        self._block, self._held = block, 0

    def _speed(self, block: int) -> float:
        return self._rates.tokens(block) / self._costs.of(block)

    def _price(self, block: int) -> float:
        """A round in plain steps."""
        return self._costs.of(block) / self._costs.of(0)

    def _affordable(self, block: int) -> bool:
        """Whether a round that keeps nothing leaves the whole above the floor."""
        steps = self._steps + self._price(block)
        return self._tokens + 1 >= FLOOR * steps - (CREDIT - _RESERVE)

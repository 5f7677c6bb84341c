"""Several conversations behind one producer: one is live, the others are parked.

A session is swapped in whole, by reference. What a prompt gets is decided by what each session
can really offer it, so that none is swapped in, refused and then thrown out for nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turbospark.errors import OptionError
from turbospark.sessions.prefix import Decision, decide_reuse, is_shallow
from turbospark.sessions.session import Session


@dataclass(slots=True, eq=False)
class _Parked:
    session: Session
    tick: int


class SessionPool:
    """The live session and those parked beside it, the least recently used of which gives way.

    Args:
        new_session: opens an empty one; a place is filled when it is first needed.
        capacity: parked sessions at most; 0 is a single session that is never parked.
        parked_bytes: what parked sessions may hold together; None is no bound.
        live: the first live session; by default a new one.

    Attributes:
        live: the session that is driven.
        evicted: whether a parked session was thrown out since the turn began.
    """

    def __init__(
        self,
        new_session: Callable[[], Session],
        capacity: int = 0,
        *,
        parked_bytes: int | None = None,
        live: Session | None = None,
    ) -> None:
        if capacity < 0:
            raise OptionError(f"a pool of {capacity} parked sessions: give 0 or more")
        self._new_session = new_session
        self.capacity = capacity
        self.parked_bytes = parked_bytes
        self.live = new_session() if live is None else live
        self.evicted = False
        self._parked: list[_Parked] = []
        self._clock = 0

    def __repr__(self) -> str:
        return f"SessionPool({self.live!r}, {len(self._parked)} of {self.capacity} parked)"

    @property
    def parked(self) -> tuple[Session, ...]:
        """The parked sessions, the least recently used first."""
        return tuple(slot.session for slot in sorted(self._parked, key=_tick))

    @property
    def nbytes(self) -> int:
        """Bytes of all sessions; rows that forks share count in each of them."""
        return self.live.nbytes + sum(slot.session.nbytes for slot in self._parked)

    def begin_turn(self) -> None:
        """Forget what earlier turns threw out."""
        self.evicted = False

    def select(self, prompt: Sequence[int], *, prefer_reuse: bool = False) -> Decision:
        """Make the session live that can keep most of a prompt; the rest of it has not moved.

        The live one wins a tie; among parked ones that are equal, the most recently used. A
        session that shares less with the prompt than would be taken back keeps its text if it can
        be kept for nothing: a live one that can be parked, and a parked one while the live one is
        empty or worthless.

        Returns:
            what the live session can offer now.
        """
        own = decide_reuse(self.live.candidate(), prompt, prefer_reuse=prefer_reuse)
        spare = not self.live.position or self.live.fed_ids.tainted
        best, decision = None, own
        for slot in sorted(self._parked, key=_tick, reverse=True):
            candidate = slot.session.candidate()
            offer = decide_reuse(candidate, prompt, prefer_reuse=prefer_reuse)
            if offer.tokens > decision.tokens and not (spare and is_shallow(candidate, prompt)):
                best, decision = slot, offer
        if best is not None:
            self._swap(best)
            return decision
        if self.capacity and own.tokens and is_shallow(self.live.candidate(), prompt):
            shared = self.live.fed_ids.common_prefix(prompt)
            back = self.live.position - shared
            return Decision(
                0, f"only {shared} tokens are shared: the other {back} are kept for their own text"
            )
        return own

    def reset(self) -> None:
        """Make an empty session live; one that holds text is parked, where there are places.

        In a full pool the least recently used session gives way, one that is tainted before any
        other. A tainted live session takes nobody's place.
        """
        outgoing, full = self.live, len(self._parked) >= self.capacity
        if not self.capacity or not outgoing.position or (full and outgoing.fed_ids.tainted):
            outgoing.reset()
            return
        if full:
            victim = min(self._parked, key=_worth)
            self._parked.remove(victim)
            self.evicted = self.evicted or victim.session.position > 0
            victim.session.reset()
            self.live = victim.session
        else:
            self.live = self._new_session()
        self._park(outgoing)

    def drop_parked(self) -> None:
        """Throw out every parked session, to make room for what is in use elsewhere."""
        self._parked = []

    def _swap(self, slot: _Parked) -> None:
        outgoing = self.live
        self._parked.remove(slot)
        self.live = slot.session
        self._park(outgoing)

    def _park(self, session: Session) -> None:
        self._clock += 1
        self._parked.append(_Parked(session, self._clock))
        limit = self.parked_bytes
        while limit is not None and self._parked:
            if sum(slot.session.nbytes for slot in self._parked) <= limit:
                return
            victim = min(self._parked, key=_worth)
            self._parked.remove(victim)
            self.evicted = self.evicted or victim.session.position > 0


def _tick(slot: _Parked) -> int:
    return slot.tick


def _worth(slot: _Parked) -> tuple[bool, int]:
    return not slot.session.fed_ids.tainted, slot.tick

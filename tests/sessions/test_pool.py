"""The pool of sessions: who is live, who is parked, who gives way."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from turbospark.errors import OptionError
from turbospark.sessions.pool import SessionPool
from turbospark.sessions.session import Session
from turbospark.testing import ScriptedCache


def new_session(reach: int | None = None) -> Session:
    return Session(lambda: [ScriptedCache(reach)], 99)


def feed(session: Session, ids: Sequence[int]) -> None:
    at = session.position
    session.caches[0].extend(ids[at:])
    session.record(ids[at:], at)


def say(pool: SessionPool, prompt: Sequence[int]) -> int:
    """A turn of a prompt; how much of it was kept."""
    pool.begin_turn()
    decision = pool.select(prompt)
    if decision.tokens:
        pool.live.take_back(decision)
    else:
        pool.reset()
    feed(pool.live, prompt)
    return decision.tokens


def test_places_are_filled_when_they_are_needed() -> None:
    made: list[Session] = []

    def make() -> Session:
        made.append(new_session())
        return made[-1]

    pool = SessionPool(make, 3)
    assert len(made) == 1
    for first in (1, 2, 3, 4, 5):
        say(pool, [first, 7, 8])
    assert len(made) == 4
    assert len(pool.parked) == 3


def test_a_pool_of_no_places_resets_the_one_session() -> None:
    session = new_session()
    pool = SessionPool(new_session, live=session)
    for first in (1, 2, 3):
        assert say(pool, [first, 7, 8]) == 0
    assert pool.live is session
    assert pool.parked == ()
    assert not pool.evicted


def test_a_pool_of_less_than_no_places_is_refused() -> None:
    with pytest.raises(OptionError, match="-1 parked"):
        SessionPool(new_session, -1)


def test_select_moves_nothing_of_what_it_offers() -> None:
    pool = SessionPool(new_session, 1)
    say(pool, [1, 2, 3, 4])
    decision = pool.select([1, 2, 3, 9])
    assert decision.tokens == 3
    assert pool.live.fed_ids.ids == [1, 2, 3, 4]


def test_among_equals_the_most_recently_used_is_swapped_in() -> None:
    pool = SessionPool(new_session, 3)
    for prompt in ([1, 2, 3, 4], [9, 9, 9], [8, 8, 8]):
        say(pool, prompt)
    twin = next(session for session in pool.parked if session.fed_ids.ids[0] == 9)
    twin.reset()
    feed(twin, [1, 2, 3, 5])
    assert pool.parked[-1] is twin
    say(pool, [1, 2, 3, 6])
    assert pool.live is twin


def test_the_prompts_list_may_change_after_the_turn() -> None:
    pool = SessionPool(new_session, 1)
    prompt = [1, 2, 3]
    say(pool, prompt)
    prompt.append(4)
    say(pool, [9, 9])
    assert pool.parked[0].fed_ids.ids == [1, 2, 3]
    say(pool, [8, 8])
    assert pool.evicted
    assert say(pool, [1, 2, 3, 4, 5]) == 0


def test_parked_sessions_keep_within_their_bytes_the_oldest_giving_way() -> None:
    pool = SessionPool(new_session, 5, parked_bytes=40)
    for first in (1, 2, 3):
        say(pool, [first, 6, 7, 8])  # 16 bytes each
        assert not pool.evicted
    say(pool, [4, 6, 7, 8])
    assert pool.evicted
    assert [session.fed_ids.ids[0] for session in pool.parked] == [2, 3]
    assert pool.nbytes == 3 * 16


def test_a_session_that_alone_exceeds_the_bytes_is_not_parked() -> None:
    pool = SessionPool(new_session, 5, parked_bytes=40)
    say(pool, [1, 2])
    say(pool, list(range(20, 40)))
    say(pool, [3, 4])
    assert pool.evicted
    assert pool.parked == ()


def test_a_swap_that_drops_the_outgoing_one_for_bytes_says_so() -> None:
    pool = SessionPool(new_session, 2, parked_bytes=40)
    say(pool, [1, 2])
    say(pool, list(range(20, 40)))
    assert say(pool, [1, 2, 3]) == 2
    assert pool.evicted


def test_a_tainted_session_is_the_first_to_give_way() -> None:
    pool = SessionPool(new_session, 2)
    say(pool, [1, 6, 7])
    say(pool, [2, 6, 7])
    pool.live.taint()
    say(pool, [3, 6, 7])
    assert [session.fed_ids.ids[0] for session in pool.parked] == [1, 2]
    say(pool, [4, 6, 7])
    assert [session.fed_ids.ids[0] for session in pool.parked] == [1, 3]


@pytest.mark.parametrize("spoil", ["taint", "reset"])
def test_a_shallow_match_is_not_cut_down_while_the_live_session_is_worthless(spoil: str) -> None:
    pool = SessionPool(new_session, 1)
    long = [1, 2, *range(20, 30)]
    say(pool, long)
    say(pool, [1, 2, *range(40, 50)])
    getattr(pool.live, spoil)()
    assert say(pool, [1, 2, *range(60, 70)]) == 0
    assert [session.fed_ids.ids for session in pool.parked] == [long]
    assert not pool.evicted


@dataclass
class Entry:
    ids: list[int]
    tick: int = 0
    tainted: bool = False


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


class PoolMachine(RuleBasedStateMachine):
    """Any order of turns, failures and resets, against a dict of what each session holds."""

    @initialize(capacity=st.integers(0, 3), reach=st.sampled_from([None, 0, 2]))
    def open(self, capacity: int, reach: int | None) -> None:
        self.pool = SessionPool(lambda: new_session(reach), capacity)
        self.reach = reach
        self.entries: dict[Session, Entry] = {self.pool.live: Entry([])}
        self.live = self.pool.live
        self.clock = 0
        self.evicted = False

    @rule(prompt=PROMPTS)
    def turn(self, prompt: list[int]) -> None:
        self.evicted = False
        own, shared = self.offer(self.entries[self.live], prompt)
        live = self.entries[self.live]
        spare = not live.ids or live.tainted
        parked = [
            (offer[0], entry.tick, session)
            for session, entry in self.parked().items()
            if (offer := self.offer(entry, prompt))[0] > own
            and not (spare and len(entry.ids) - offer[1] > offer[1])
        ]
        kept = own
        if parked:
            kept, _, session = max(parked, key=lambda item: item[:2])
            self.park(self.live)
            self.live = session
        elif self.pool.capacity and len(live.ids) - shared > shared:
            kept = 0
        if kept == 0:
            self.expect_reset()
        assert say(self.pool, prompt) == kept
        self.entries.setdefault(self.pool.live, Entry([]))
        if kept == 0:
            self.learn_live()
        self.entries[self.live].ids = list(prompt)

    @rule()
    def fail(self) -> None:
        self.pool.live.taint()
        self.entries[self.live].tainted = True

    @rule()
    def reset(self) -> None:
        self.pool.begin_turn()
        self.evicted = False
        self.expect_reset()
        self.pool.reset()
        self.learn_live()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.live is self.live
        assert len(pool.parked) <= pool.capacity
        assert {id(session) for session in pool.parked} == {id(s) for s in self.parked()}
        assert len({id(s) for s in (pool.live, *pool.parked)}) == len(pool.parked) + 1
        assert pool.evicted == self.evicted
        for session, entry in self.entries.items():
            assert session.fed_ids.ids == session.caches[0].ids == entry.ids
            assert session.fed_ids.tainted == entry.tainted

    def parked(self) -> dict[Session, Entry]:
        return {s: entry for s, entry in self.entries.items() if s is not self.live}

    def offer(self, entry: Entry, prompt: Sequence[int]) -> tuple[int, int]:
        if entry.tainted:
            return 0, 0
        shared = 0
        while shared < min(len(entry.ids), len(prompt) - 1) and entry.ids[shared] == prompt[shared]:
            shared += 1
        back = len(entry.ids) - shared
        return (0 if self.reach is not None and back > self.reach else shared), shared

    def park(self, session: Session) -> None:
        self.clock += 1
        self.entries[session].tick = self.clock

    def expect_reset(self) -> None:
        """What a reset does; which object is live afterwards is learnt from the pool."""
        live, parked = self.entries[self.live], self.parked()
        full = len(parked) >= self.pool.capacity
        self.next_live: Session | None = self.live
        if not self.pool.capacity or not live.ids or (full and live.tainted):
            self.entries[self.live] = Entry([])
            return
        self.next_live = None
        if full:
            victim = min(parked, key=lambda s: (not parked[s].tainted, parked[s].tick))
            self.evicted = bool(parked[victim].ids)
            self.entries[victim] = Entry([])
            self.next_live = victim
        self.park(self.live)

    def learn_live(self) -> None:
        if self.next_live is None:
            assert all(self.pool.live is not s or not e.ids for s, e in self.entries.items())
            self.entries[self.pool.live] = Entry([])
            self.next_live = self.pool.live
        self.live = self.next_live


Test43AnyTurnsAgreeWithADict = PoolMachine.TestCase
Test43AnyTurnsAgreeWithADict.settings = settings(max_examples=60, stateful_step_count=40)


def test_43_the_pool_never_outgrows_its_capacity() -> None:
    """A thousand turns of conversations that come and go."""
    rng = random.Random(3)
    for capacity in (0, 1, 3):
        pool = SessionPool(new_session, capacity)
        for _ in range(1000):
            say(pool, [rng.randrange(4) for _ in range(rng.randrange(1, 6))])
            everyone = (pool.live, *pool.parked)
            assert len(everyone) <= capacity + 1
            assert len({id(session) for session in everyone}) == len(everyone)
            assert len({id(session.caches[0]) for session in everyone}) == len(everyone)

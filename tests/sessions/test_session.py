"""Caches and record move together."""

import pytest

from turbospark.errors import RewindError
from turbospark.sessions.session import Session
from turbospark.testing import ScriptedCache


def make(reach: int | None = None) -> Session:
    session = Session(lambda: [ScriptedCache(), ScriptedCache(reach)], 50)
    for cache in session.caches:
        cache.ids.extend([5, 6, 7, 8])
    session.record([5, 6, 7, 8], 0)
    return session


def test_rewind_moves_every_cache_and_the_record() -> None:
    session = make()
    session.rewind_to(1)
    assert session.position == 1
    assert [cache.ids for cache in session.caches] == [[5], [5]]
    assert session.fed_ids.ids == [5]


def test_rewind_past_one_cache_moves_none() -> None:
    session = make(reach=2)
    assert session.max_rewind == 2
    with pytest.raises(RewindError, match="can go back 2 tokens"):
        session.rewind_to(1)
    assert [cache.offset for cache in session.caches] == [4, 4]
    assert session.fed_ids.ids == [5, 6, 7, 8]
    session.rewind_to(2)
    assert session.position == 2


def test_rewind_forward_is_refused() -> None:
    with pytest.raises(RewindError, match="position 9"):
        make().rewind_to(9)


def test_a_rewind_by_nothing_touches_no_cache() -> None:
    session = make()
    session.rewind_to(4)
    assert session.caches[0].rewinds == []


def test_reset_lifts_a_taint_and_takes_new_caches() -> None:
    session = make()
    old = session.caches
    session.taint()
    session.pending = 3
    session.reset()
    assert session.caches[0] is not old[0]
    assert session.position == 0
    assert not session.fed_ids.tainted
    assert session.text_ids == []


def test_the_text_ends_with_the_pending_token() -> None:
    session = make()
    session.pending = 9
    assert session.text_ids == [5, 6, 7, 8, 9]
    session.record([9], 4)
    assert session.text_ids == [5, 6, 7, 8, 9]

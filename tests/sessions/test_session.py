"""Caches and record move together."""

import pytest

from turbospark.errors import ProducerError, RewindError
from turbospark.sessions.checkpoints import Checkpoints
from turbospark.sessions.prefix import Decision
from turbospark.sessions.session import OpenRound, Session
from turbospark.testing import ScriptedCache, ScriptedDrafter, ScriptedModel, scripted_runner


def make(reach: int | None = None) -> Session:
    session = Session(lambda: [ScriptedCache(), ScriptedCache(reach)], 50)
    for cache in session.caches:
        cache.ids.extend([5, 6, 7, 8])
    session.record([5, 6, 7, 8], 0)
    return session


def go_back(session: Session, position: int) -> None:
    kept = [kept for kept in session.checkpoints.all if kept.position == position]
    session.take_back(Decision(position, "", checkpoint=kept[0] if kept else None))


def test_rewind_moves_every_cache_and_the_record() -> None:
    session = make()
    go_back(session, 1)
    assert session.position == 1
    assert [cache.ids for cache in session.caches] == [[5], [5]]
    assert session.fed_ids.ids == [5]


def test_rewind_past_one_cache_moves_none() -> None:
    session = make(reach=2)
    with pytest.raises(RewindError, match="it can by 2"):
        go_back(session, 1)
    assert [cache.offset for cache in session.caches] == [4, 4]
    assert session.fed_ids.ids == [5, 6, 7, 8]
    go_back(session, 2)
    assert session.position == 2


def test_rewind_forward_is_refused() -> None:
    with pytest.raises(RewindError, match="at 9 lies ahead"):
        go_back(make(), 9)


def test_a_rewind_by_nothing_touches_no_cache() -> None:
    session = make()
    go_back(session, 4)
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


def hybrid(ids: list[int], every: int = 2, budget: int = 1 << 20) -> Session:
    """A session with recurrent layers and a step drafter, fed in chunks of `every`."""
    model = ScriptedModel(recurrent=2)
    drafter = ScriptedDrafter(model.logits_of)
    runner = scripted_runner(model, drafter, checkpoint_every=every, checkpoint_bytes=budget)
    for at in range(0, len(ids), every):
        runner.prefill_chunk(ids[at : at + every], at, is_final=False)
    return runner.session


def test_recurrent_layers_rewind_to_checkpoints_alone() -> None:
    session = hybrid([5, 6, 7, 8, 9])
    assert session.recurrent
    assert [kept.position for kept in session.checkpoints.all] == [2, 4]
    with pytest.raises(RewindError, match="no state was kept"):
        go_back(session, 3)
    assert session.position == 5
    go_back(session, 4)
    assert {cache.offset for cache in session.caches} == {4}
    assert session.drafter_state.covered == 4  # by the mark that was kept with the states
    assert session.draft_off == ""
    go_back(session, 2)
    assert [kept.position for kept in session.checkpoints.all] == [2]


@pytest.mark.parametrize(("seen", "left"), [(8, 0), (4, 0), (3, 0), (2, 2)])
def test_drafting_off_keeps_only_rows_before_what_was_taken_back(seen: int, left: int) -> None:
    model = ScriptedModel()
    runner = scripted_runner(model, ScriptedDrafter(model.logits_of, block_passes=True))
    runner.prefill_chunk(range(8), 0)
    session = runner.session
    session.drafter_state.rewind(seen)
    session.take_back(Decision(3, "", draft_off="because"))
    assert session.draft_off == "because"
    assert session.drafter_state.cursor == left


def test_every_move_counts() -> None:
    session = make()
    seen = {session.epoch}
    for move in (lambda: go_back(session, 3), session.reset, session.taint):
        move()
        assert session.epoch not in seen
        seen.add(session.epoch)


def test_nothing_untrusted_becomes_a_checkpoint() -> None:
    for spoil in ("taint", "round", "budget"):
        session = hybrid([5, 6, 7], every=9, budget=0 if spoil == "budget" else 1 << 20)
        if spoil == "taint":
            session.taint()
        if spoil == "round":
            session.open_round = OpenRound(session.epoch, 3)
        session.keep_checkpoint()
        assert len(session.checkpoints) == 0
    session = hybrid([5, 6, 7], every=9)
    session.keep_checkpoint()
    assert len(session.checkpoints) == 1
    assert make().checkpoints.budget
    plain = make()
    plain.keep_checkpoint()
    assert len(plain.checkpoints) == 0


def test_the_mark_of_a_drafter_that_is_off_is_not_kept() -> None:
    session = hybrid([5, 6, 7], every=9)
    session.draft_off = "it has not seen the text"
    session.keep_checkpoint()
    assert session.checkpoints.all[0].mark is None


def test_the_bytes_are_those_of_caches_drafter_and_checkpoints() -> None:
    session = hybrid([5, 6, 7, 8])
    parts = sum(cache.nbytes for cache in session.caches), session.drafter_state.nbytes
    assert session.nbytes == sum(parts) + session.checkpoints.nbytes
    assert session.checkpoints.nbytes == 2 * 2 * 8
    assert all(part > 0 for part in parts)


def test_a_fork_has_the_same_and_shares_no_container() -> None:
    session = hybrid([5, 6, 7, 8])
    session.pending = 9
    session.extras["delta"] = session.caches[2].state[0]
    twin = session.fork()
    assert twin.text_ids == [5, 6, 7, 8, 9]
    assert twin.caches[2].state[0] is session.caches[2].state[0]
    go_back(session, 2)
    session.extras.clear()
    assert twin.fed_ids.ids == [5, 6, 7, 8]
    assert {cache.offset for cache in twin.caches} == {4}
    assert [kept.position for kept in twin.checkpoints.all] == [2, 4]
    assert twin.drafter_state.covered == 4
    assert set(twin.extras) == {"delta"}
    session.open_round = OpenRound(session.epoch, 2)
    with pytest.raises(ProducerError, match="speculative round"):
        session.fork()


def test_a_reset_forgets_checkpoints_extras_and_the_drafters_rows() -> None:
    session = hybrid([5, 6, 7, 8])
    session.extras["delta"] = session.caches[2].state[0]
    session.draft_off = "because"
    session.open_round = OpenRound(session.epoch, 4)
    session.reset()
    assert len(session.checkpoints) == 0
    assert session.extras == {}
    assert session.drafter_state.covered == 0
    assert session.draft_off == ""
    assert session.open_round is None
    assert {cache.offset for cache in session.caches} == {0}


def test_a_session_keeps_the_checkpoints_it_was_given() -> None:
    kept = Checkpoints(0)
    assert Session(list, 9, checkpoints=kept).checkpoints is kept

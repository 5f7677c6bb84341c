"""Sessions in slots through the runner; numbers are those of the behaviours."""

import numpy as np
import pytest
from runner.turns import expected, invariant, turn

from turbospark.errors import ProducerError
from turbospark.runner.loops import prefill
from turbospark.runner.runner import Runner
from turbospark.testing import ScriptedModel, scripted_runner

HEAD = [1, 2]
A = [*HEAD, *range(10, 21)]
B = [*HEAD, *range(30, 41)]
C = [*HEAD, *range(50, 61)]


def parked_ids(runner: Runner) -> list[list[int]]:
    return [session.fed_ids.ids for session in runner.pool.parked]


def test_29_with_one_slot_a_shallow_match_is_reused_in_place() -> None:
    runner = scripted_runner(slots=1)
    turn(runner, A)
    session = runner.session
    done = turn(runner, B)
    assert done.reuse.tokens == len(HEAD)
    assert runner.session is session
    assert runner.pool.parked == ()


@pytest.mark.parametrize(
    "chunk", [pytest.param(0, id="30_stepwise"), pytest.param(5, id="31_chunks")]
)
@pytest.mark.parametrize("recurrent", [0, 1])
def test_30_31_32_with_two_slots_a_shallow_match_is_parked_and_continues_later(
    chunk: int, recurrent: int
) -> None:
    model = ScriptedModel(recurrent=recurrent)
    runner = scripted_runner(model, slots=2, checkpoint_bytes=0)
    first = turn(runner, A, 2, chunk)
    other = turn(runner, B, 2, chunk)
    assert other.reuse.tokens == 0
    if not recurrent:
        assert "only 2 tokens are shared" in other.reuse.reason
    assert parked_ids(runner) == [first.ids]
    again = turn(runner, [*first.ids, 70, 71], 2, chunk)
    assert again.reuse.tokens == len(first.ids) >= 12
    assert again.row == expected(model, again.ids)  # a recurrent state came with its rows
    assert parked_ids(runner) == [other.ids]
    invariant(runner)


def test_33_what_takes_back_no_more_than_it_shares_stays_in_place() -> None:
    runner = scripted_runner(slots=2)
    turn(runner, [1, 2, 3, 4, 5, 6])
    session = runner.session
    assert turn(runner, [1, 2, 3, 70, 71]).reuse.tokens == 3
    assert runner.session is session
    assert runner.pool.parked == ()


def test_34_a_parked_session_may_take_back_more_than_it_shares() -> None:
    runner = scripted_runner(slots=2)
    long = list(range(42))
    turn(runner, long)
    turn(runner, [90, 91, 92])
    done = turn(runner, [*range(15), 95, 96, 97])
    assert done.reuse.tokens == 15
    assert parked_ids(runner) == [[90, 91, 92]]
    assert done.row == expected(runner.model, done.ids)  # type: ignore[arg-type]


def test_35_a_tie_leaves_the_live_session_live() -> None:
    runner = scripted_runner(slots=2)
    turn(runner, [1, 2, 3, 4])
    turn(runner, [9, 2, 3, 4])
    turn(runner, [1, 2, 3, 8])
    live, parked = runner.session, runner.pool.parked
    parked[0].reset()
    parked[0].record([1, 2, 3, 4], 0)
    for cache in parked[0].caches:
        cache.extend([1, 2, 3, 4])
    assert runner.try_reuse_prefix([1, 2, 3, 60]).tokens == 3
    assert runner.session is live
    assert runner.pool.parked == parked


def test_36_one_token_more_swaps_and_parks_the_live_one_as_newest() -> None:
    runner = scripted_runner(slots=3)
    unrelated, wide, near = [90, 91, 92], list(range(1, 17)), [1, 2, 3, 4, 5, 60, 61]
    for prompt in (unrelated, wide, near):
        assert turn(runner, prompt).reuse.tokens == 0
    assert parked_ids(runner) == [unrelated, wide]
    assert turn(runner, [1, 2, 3, 4, 5, 6, 70]).reuse.tokens == 6
    assert parked_ids(runner) == [unrelated, near]
    turn(runner, [*unrelated, 93])
    assert parked_ids(runner) == [near, [1, 2, 3, 4, 5, 6, 70]]


def test_37_no_match_swaps_nothing() -> None:
    runner = scripted_runner(slots=2)
    turn(runner, A)
    turn(runner, [90, 91, 92])
    live, parked = runner.session, runner.pool.parked
    assert runner.try_reuse_prefix([70, 71, 72]).tokens == 0
    assert runner.session is live
    assert runner.pool.parked == parked


@pytest.mark.parametrize(("slots", "evicted"), [(2, True), (3, False)])
def test_38_a_third_conversation_evicts_the_oldest_only_without_a_slot(
    slots: int, evicted: bool
) -> None:
    runner = scripted_runner(slots=slots)
    first, second = turn(runner, A), turn(runner, B)
    assert not first.evicted
    assert not second.evicted
    assert turn(runner, C).evicted == evicted
    assert ([*A] in parked_ids(runner)) != evicted
    assert turn(runner, [*A, 70]).reuse.tokens == (0 if evicted else len(A))


def test_39_the_least_recently_used_gives_way() -> None:
    runner = scripted_runner(slots=2)
    turn(runner, A)
    turn(runner, B)
    turn(runner, [*A, 70])
    assert turn(runner, C).evicted
    assert parked_ids(runner) == [[*A, 70]]


def test_40_an_untouched_session_is_never_parked() -> None:
    runner = scripted_runner(slots=3)
    runner.reset()
    assert runner.pool.parked == ()
    turn(runner, A)
    runner.reset()
    runner.reset()
    assert parked_ids(runner) == [A]


def test_41_a_slot_that_never_served_is_no_eviction() -> None:
    runner = scripted_runner(slots=2)
    turn(runner, A)
    runner.pool.parked  # noqa: B018
    assert not turn(runner, B).evicted
    runner.pool.parked[0].reset()
    assert not turn(runner, C).evicted


def test_42_a_turn_that_reuses_reports_no_eviction_of_the_turn_before() -> None:
    runner = scripted_runner(slots=2)
    turn(runner, A)
    turn(runner, B)
    third = turn(runner, C)
    assert third.evicted
    later = turn(runner, [*C, 70])
    assert later.reuse.tokens == len(C)
    assert not later.evicted
    assert not later.reuse.evicted
    assert not runner.session_slot_evicted()


def test_42_the_loops_report_an_eviction_on_its_own_turn() -> None:
    runner = scripted_runner(slots=2)
    prompts = (A, B, C, [*C, 70], [*B, 70], [*A, 70])
    reports = [prefill(runner, prompt).reuse.evicted for prompt in prompts]
    assert reports == [False, False, True, False, False, True]


def test_44_a_tainted_session_is_parked_tainted_and_never_matches() -> None:
    runner = scripted_runner(ScriptedModel(fail_on=66), slots=2)
    turn(runner, A)
    with pytest.raises(ProducerError):
        runner.produce(66, len(A))
    turn(runner, B)
    assert runner.pool.parked[0].fed_ids.tainted
    assert turn(runner, [*A, 70]).reuse.tokens == 0


def test_44_a_tainted_session_takes_nobodys_place() -> None:
    runner = scripted_runner(ScriptedModel(fail_on=66), slots=2)
    turn(runner, A)
    turn(runner, B)
    with pytest.raises(ProducerError):
        runner.produce(66, len(B))
    assert not turn(runner, C).evicted
    assert parked_ids(runner) == [A]


@pytest.mark.parametrize("inside", [1, 2, 3])
def test_45_a_swap_that_would_be_refused_evicts_nobody(inside: int) -> None:
    runner = scripted_runner(ScriptedModel(recurrent=1), slots=2, checkpoint_bytes=0)
    first = turn(runner, A, 4)
    second = turn(runner, B, 4)
    third = turn(runner, [*first.ids[: len(A) + inside], 70, 71])
    assert third.reuse.tokens == 0
    assert second.ids in parked_ids(runner)
    assert turn(runner, [*second.ids, 72]).reuse.tokens == len(second.ids)


def test_45_with_checkpoints_it_is_swapped_in_and_goes_back_to_the_prompt() -> None:
    model = ScriptedModel(recurrent=1)
    runner = scripted_runner(model, slots=2)
    first = turn(runner, A, 4)
    second = turn(runner, B, 4)
    third = turn(runner, [*first.ids[: len(A) + 2], 70, 71])
    assert third.reuse.tokens == len(A)
    assert not third.evicted
    assert third.row == expected(model, third.ids)
    assert parked_ids(runner) == [second.ids]
    assert turn(runner, [*second.ids, 72]).reuse.tokens == len(second.ids)


def test_46_a_swap_moves_references() -> None:
    runner = scripted_runner(ScriptedModel(recurrent=1), slots=2)
    first = turn(runner, A).ids
    session, caches = runner.session, list(runner.session.caches)
    rows, state = caches[0].ids, caches[2].state[0]
    turn(runner, B)
    assert runner.session is not session
    runner.try_reuse_prefix([*first, 70])
    assert runner.session is session
    assert all(now is then for now, then in zip(session.caches, caches, strict=True))
    assert session.caches[0].ids is rows
    assert session.caches[2].state[0] is state


def test_interleaved_conversations_feed_nothing_twice_and_say_what_they_say_alone() -> None:
    """Also where they share what was said last, and where one is another's beginning."""
    model = ScriptedModel(recurrent=1, reach=3)
    runner = scripted_runner(model, slots=3)
    texts = [[*HEAD, 7, 7], [*HEAD, 7, 7, 8], [*HEAD, 9]]
    alone = [scripted_runner(ScriptedModel()) for _ in texts]
    for number in range(5):
        for index, text in enumerate(texts):
            prompt = [*text, 70 + number, 7, 7]
            done = turn(runner, prompt, 3)
            if number:
                assert done.reuse.tokens == len(text)
            assert done.ids == turn(alone[index], prompt, 3).ids
            texts[index] = done.ids
            assert not done.evicted


def test_a_conversation_after_others_says_what_it_says_cold() -> None:
    rng = np.random.default_rng(5)
    for slots in (1, 2, 3):
        model = ScriptedModel(recurrent=1)
        runner = scripted_runner(model, slots=slots)
        for prompt in (A, B, C):
            turn(runner, prompt, int(rng.integers(0, 4)))
        assert turn(runner, C[:6], 5).ids == turn(scripted_runner(model), C[:6], 5).ids


def test_a_recurrent_state_is_as_new_when_its_slot_is_taken_over() -> None:
    runner = scripted_runner(ScriptedModel(recurrent=2), slots=2)
    for prompt in (A, B, C):
        turn(runner, prompt)
    runner.reset()
    fresh = runner.session.fresh_caches()
    for cache, new in zip(runner.session.caches[2:], fresh[2:], strict=True):
        assert cache.offset == 0
        assert cache.state[0].tolist() == new.state[0].tolist()


def test_two_forks_of_one_prefix_do_not_touch_each_other() -> None:
    model = ScriptedModel(recurrent=1)
    runner = scripted_runner(model)
    turn(runner, A, 2)
    fork = Runner(model, runner.session.fork(), prefix_reuse=True)
    state = fork.session.caches[2].state[0]
    ids = fork.session.fed_ids.ids
    turn(runner, [*ids, 70, 71], 4)
    assert fork.session.caches[0].ids == ids
    assert fork.session.caches[2].state[0] is state
    done = turn(fork, [*ids, 80], 3)
    assert done.reuse.tokens == len(ids)
    assert done.row == expected(model, done.ids)
    assert runner.session.fed_ids.ids[len(ids)] == 70

"""The drafter beside the target: continuity over turns, rounds, rollbacks; numbered behaviours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from runner.turns import best, draft, expected, invariant, row, speculate, start, turn

from turbospark.errors import ProducerError
from turbospark.runner.runner import Runner
from turbospark.testing import ScriptedDrafter, ScriptedModel, hashed_logits, scripted_runner

A = [1, 2, 3, 4, 5, 6, 7, 8, 9]
QUALITIES = ["perfect", "useless", "alternating"]


def drafting(
    quality: Any = "alternating", *, block_passes: bool = False, recurrent: int = 0, **options: Any
) -> Runner:
    model = ScriptedModel(hashed_logits(53), vocab_size=53, recurrent=recurrent)
    drafter = ScriptedDrafter(model.logits_of, quality, block_passes=block_passes)
    return scripted_runner(model, drafter, **options)


def primed(runner: Runner) -> None:
    """The drafter has written what a fully primed one has; of a last row the token is not known."""
    session, drafter = runner.session, runner.drafter
    assert isinstance(drafter, ScriptedDrafter)
    state, ids = session.drafter_state, session.fed_ids.ids
    reference = drafter.rows_of(ids)
    assert state.rows[: len(reference)] == reference
    assert len(state.rows) <= len(ids)
    assert state.covered == len(ids)


def rounds(runner: Runner, logits: Sequence[float], count: int, block: int = 3) -> list[int]:
    """So many rounds; every token fed, and the one that follows."""
    following = best(logits)
    tokens: list[int] = []
    for _ in range(count):
        *fed, following = speculate(runner, following, block)
        tokens += fed
        primed(runner)
        invariant(runner)
    return [*tokens, following]


@pytest.mark.parametrize("recurrent", [0, 1])
@pytest.mark.parametrize("block_passes", [False, True])
@pytest.mark.parametrize("chunk", [0, 4, None])
def test_47_a_divergence_keeps_what_the_drafter_can_follow_from(
    chunk: int | None, block_passes: bool, recurrent: int
) -> None:
    runner = drafting(block_passes=block_passes, recurrent=recurrent, checkpoint_every=1)
    rounds(runner, turn(runner, A).row, 2)
    prompt = [*A[:6], 40, 41, 42, 43]
    done = turn(runner, prompt, 0, chunk)
    if not recurrent:
        assert done.reuse.tokens == (6 if block_passes else 5)
    assert runner.draft_off_reason() is None
    primed(runner)
    assert done.row == expected(runner.model, prompt)  # type: ignore[arg-type]
    rounds(runner, done.row, 2)


def test_47_a_drafter_that_has_not_seen_the_rows_keeps_none() -> None:
    runner = drafting()
    turn(runner, A, 3)
    runner.session.drafter_state = runner.drafter.new_state(99)
    reuse = runner.try_reuse_prefix([*A, 40])
    assert reuse.tokens == 0
    assert "the drafter has not seen all" in reuse.reason


@pytest.mark.parametrize("block_passes", [False, True])
def test_48_a_parked_session_comes_back_with_its_own_drafter_state(block_passes: bool) -> None:
    runner = drafting(block_passes=block_passes, slots=2)
    text = [*A, *rounds(runner, turn(runner, A).row, 2)]
    session, state = runner.session, runner.session.drafter_state
    rounds(runner, turn(runner, [30, 31, 32, 33]).row, 1)
    assert runner.session.drafter_state is not state
    done = turn(runner, [*text, 40])
    assert done.reuse.tokens >= len(text) - 1
    assert runner.session is session
    assert runner.session.drafter_state is state
    rounds(runner, done.row, 2)


@pytest.mark.parametrize(
    ("steps", "tokens"), [pytest.param(0, 0, id="lag_1"), pytest.param(4, 4, id="plain_steps")]
)
def test_49_50_a_turn_after_a_prompt_or_plain_steps_is_continued_and_drafts(
    steps: int, tokens: int
) -> None:
    """The one-row lag after a prompt, or captured rows of plain steps, are made up for."""
    runner = drafting("perfect")
    text = turn(runner, A, steps).ids
    assert len(text) == len(A) + tokens
    done = turn(runner, [*text, 40, 41])
    assert done.reuse.tokens == len(text)
    assert runner.draft_off_reason() is None
    primed(runner)
    kept = speculate(runner, best(done.row), 4)
    assert len(kept) == 6  # it did draft, and all of it was kept


def test_49_a_drafter_that_was_primed_ahead_gives_the_last_row_up() -> None:
    """Its last row was written with a token that another prompt does not have."""
    runner = drafting("perfect")
    turn(runner, A)
    runner.prime_drafter(50, len(A) - 1)
    assert runner.session.drafter_state.cursor == len(A)
    done = turn(runner, [*A, 40, 41])
    assert done.reuse.tokens == len(A) - 1
    primed(runner)
    assert done.row == expected(runner.model, done.ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefer_reuse", [False, True])
def test_50_rows_that_were_fed_without_the_drafter_stop_reuse_or_drafting(
    prefer_reuse: bool,
) -> None:
    runner = drafting(prefer_reuse=prefer_reuse, max_context=200)
    text = turn(runner, [*range(50)], 2).ids
    state = runner.session.drafter_state
    del state.rows[9:], state.captured[:], state.ids[9:]
    done = turn(runner, [*text, 40])
    assert done.reuse.tokens == (len(text) if prefer_reuse else 0)
    assert done.row == expected(runner.model, done.ids)  # type: ignore[arg-type]
    reason = runner.draft_off_reason()
    assert (reason is not None) == prefer_reuse
    if not prefer_reuse:
        primed(runner)
        return
    assert reason is not None
    assert "has not seen" in reason
    with pytest.raises(ProducerError, match="has not seen"):
        runner.draft_step(40, len(text))
    runner.reset()
    assert runner.draft_off_reason() is None


def test_50_drafting_is_on_again_where_a_later_prompt_parts_before_the_gap() -> None:
    runner = drafting(prefer_reuse=True, max_context=200)
    text = turn(runner, [*range(50)], 2).ids
    state = runner.session.drafter_state
    del state.rows[20:], state.captured[:], state.ids[20:]
    assert turn(runner, [*text, 40]).reuse.tokens == len(text)
    assert runner.draft_off_reason() is not None
    done = turn(runner, [*range(15), 40, 41])
    assert done.reuse.tokens == 14
    assert runner.draft_off_reason() is None
    primed(runner)
    rounds(runner, done.row, 2)


@pytest.mark.parametrize("quality", QUALITIES)
def test_51_the_missing_row_is_written_before_the_first_new_one(quality: Any) -> None:
    runner = drafting(quality)
    text = [*A, *rounds(runner, turn(runner, A).row, 3)]
    session = runner.session
    fed = session.fed_ids.ids
    assert session.drafter_state.cursor == len(fed) - 1  # the row before the last token given
    start(runner, [*text, 40, 41, 42])
    for position in range(len(fed), len(text) + 3):
        token = [*text, 40, 41, 42][position]
        runner.prefill_chunk([token], position)
        state = session.drafter_state
        assert state.rows == runner.drafter.rows_of(session.fed_ids.ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize("block_passes", [False, True])
def test_52_reset_takes_the_drafter_to_position_0(block_passes: bool) -> None:
    runner = drafting(block_passes=block_passes)
    rounds(runner, turn(runner, A).row, 1)
    assert runner.session.drafter_state.cursor > 0
    runner.reset()
    assert runner.session.drafter_state.cursor == 0
    assert runner.session.drafter_state.covered == 0
    rounds(runner, turn(runner, [7, 8, 9]).row, 1)


def test_53_parking_and_resuming_moves_the_drafters_state() -> None:
    runner = drafting("alternating", slots=3, recurrent=1)
    texts = [[1, 2, 3], [1, 2, 4], [5, 6]]
    states: list[Any] = [None] * len(texts)
    for number in range(4):
        for index, text in enumerate(texts):
            done = turn(runner, [*text, 40 + number])
            if number:
                assert done.reuse.tokens >= len(text) - 1
                assert runner.session.drafter_state is states[index]
            states[index] = runner.session.drafter_state
            primed(runner)
            texts[index] = [*done.ids, *rounds(runner, done.row, 2)]


@pytest.mark.parametrize("then", ["produce", "prefill_chunk", "rollback", "verify", "reset"])
@pytest.mark.parametrize("recurrent", [0, 1])
def test_54_a_verify_of_the_past_cannot_be_cut(then: str, recurrent: int) -> None:
    runner = drafting(recurrent=recurrent)
    turn(runner, A)
    point = runner.checkpoint()
    verified = runner.verify([20, 21, 22], len(A))
    if then == "reset":
        runner.reset()
    elif then == "rollback":
        runner.rollback(point)
    else:
        runner.record_committed([20, 21, 22], len(A), verified)
        position = len(A) + 3
        if then == "produce":
            runner.produce(23, position)
        elif then == "prefill_chunk":
            runner.prefill_chunk([23, 24], position)
        else:
            runner.verify([23, 24, 25], position)
    held = runner.session.caches[0].ids[:]
    for call in (
        lambda: runner.rollback_retaining(point, 2, verified),
        lambda: runner.record_committed([20, 21], len(A), verified),
    ):
        with pytest.raises(ProducerError, match="has moved since"):
            call()
    assert runner.session.caches[0].ids == held


def test_54_rows_are_cut_once() -> None:
    runner = drafting()
    turn(runner, A)
    point = runner.checkpoint()
    verified = runner.verify([20, 21, 22], len(A))
    runner.rollback_retaining(point, 2, verified)
    with pytest.raises(ProducerError, match="cut already"):
        runner.rollback_retaining(point, 1, verified)
    runner.record_committed([20, 21], len(A), verified)
    assert runner.session.fed_ids.ids == [*A, 20, 21]


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
@pytest.mark.parametrize("block_passes", [False, True])
@pytest.mark.parametrize("recurrent", [0, 2])
def test_55_keeping_rows_equals_going_back_and_feeding_them(
    recurrent: int, block_passes: bool, keep: int
) -> None:
    feed = [20, 21, 22, 23]
    retaining = drafting(recurrent=recurrent, block_passes=block_passes)
    turn(retaining, A)
    point = retaining.checkpoint()
    verified = retaining.verify(feed, len(A))
    if keep < len(feed):
        retaining.rollback_retaining(point, keep, verified)
    retaining.record_committed(feed[:keep], len(A), verified)

    again = drafting(recurrent=recurrent, block_passes=block_passes)
    turn(again, A)
    point = again.checkpoint()
    again.verify(feed, len(A))
    again.rollback(point)
    second = again.verify(feed[:keep], len(A))
    again.record_committed(feed[:keep], len(A), second)

    never = drafting(recurrent=recurrent, block_passes=block_passes)
    turn(never, A)
    for index in range(keep):
        never.produce(feed[index], len(A) + index)

    ids = [*A, *feed[:keep]]
    for runner in (retaining, again, never):
        assert runner.session.fed_ids.ids == ids
        invariant(runner)
        primed(runner)
    numbers = [
        [cache.state[0].tolist() for cache in r.session.caches[2:]]
        for r in (retaining, again, never)
    ]
    assert numbers[0] == numbers[1] == numbers[2]
    rows = [row(r.produce(30, len(ids))) for r in (retaining, again, never)]
    assert rows[0] == rows[1] == rows[2]
    lines = np.asarray(verified.logits).tolist()[:keep]
    assert lines == [expected(retaining.model, [*A, *feed[: i + 1]]) for i in range(keep)]  # type: ignore[arg-type]


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("block_passes", [False, True])
@pytest.mark.parametrize("recurrent", [0, 1])
def test_56_the_record_of_rounds_is_the_prompt_and_what_was_kept(
    recurrent: int, block_passes: bool, quality: Any
) -> None:
    runner = drafting(quality, block_passes=block_passes, recurrent=recurrent)
    done = turn(runner, A)
    tokens = rounds(runner, done.row, 3, block=3)
    plain = turn(scripted_runner(ScriptedModel(hashed_logits(53), vocab_size=53)), A, len(tokens))
    assert [*A, *tokens] == plain.ids
    assert runner.session.fed_ids.ids == [*A, *tokens[:-1]]
    later = turn(runner, [*A, *tokens, 40])
    assert later.reuse.tokens == len(A) + len(tokens) - 1
    assert later.row == expected(runner.model, later.ids)  # type: ignore[arg-type]


def test_a_verify_counts_for_nothing_until_it_is_recorded() -> None:
    runner = drafting()
    turn(runner, A)
    verified = runner.verify([20, 21], len(A))
    assert runner.session.fed_ids.ids == A
    assert not runner.session.fed_ids.tainted
    assert runner.session.drafter_state.covered == len(A)
    for call in (
        lambda: runner.produce(5, len(A) + 2),
        lambda: runner.prefill_chunk([5], len(A) + 2),
        lambda: runner.verify([5], len(A) + 2),
        lambda: runner.draft_step(5, len(A) - 1),
        lambda: runner.session.fork(),
    ):
        with pytest.raises(ProducerError, match=r"is open|speculative round"):
            call()
    runner.record_committed([20, 21], len(A), verified)
    assert runner.session.fed_ids.ids == [*A, 20, 21]


def test_rows_that_were_not_taken_back_cannot_be_left_out_of_the_record() -> None:
    runner = drafting()
    turn(runner, A)
    verified = runner.verify([20, 21, 22], len(A))
    for tokens, at in (([20, 21], len(A)), ([20, 21, 22], len(A) - 1), ([], len(A))):
        with pytest.raises(ProducerError, match="rows verified are 9 to 11"):
            runner.record_committed(tokens, at, verified)
    assert runner.session.fed_ids.ids == A


@pytest.mark.parametrize("keep", [0, 4, -1])
def test_keep_must_be_a_row_count_of_the_verify(keep: int) -> None:
    runner = drafting(recurrent=1)
    turn(runner, A)
    point = runner.checkpoint()
    verified = runner.verify([20, 21, 22], len(A))
    with pytest.raises(ProducerError, match="1 to 3 can be kept"):
        runner.rollback_retaining(point, keep, verified)
    other = runner.checkpoint()
    with pytest.raises(ProducerError, match="the point is at 12"):
        runner.rollback_retaining(other, 2, verified)
    runner.rollback(point)
    invariant(runner)


@pytest.mark.parametrize("recurrent", [0, 1])
def test_a_point_ahead_is_refused(recurrent: int) -> None:
    runner = drafting(recurrent=recurrent)
    turn(runner, A)
    point = runner.checkpoint()
    runner.reset()
    turn(runner, A[:4])
    with pytest.raises(ProducerError, match="lies ahead"):
        runner.rollback(point)
    assert runner.session.fed_ids.ids == A[:4]


@pytest.mark.parametrize("recurrent", [0, 1])
def test_a_point_before_tokens_that_count_takes_their_record_back_too(recurrent: int) -> None:
    runner = drafting(recurrent=recurrent, checkpoint_every=1)
    turn(runner, A)
    point = runner.checkpoint()
    for position in (len(A), len(A) + 1):
        runner.produce(20, position)
    runner.session.pending = 21
    rows = runner.session.drafter_state.covered
    runner.rollback(point)
    assert runner.session.fed_ids.ids == A
    assert runner.session.text_ids == A
    assert all(kept.position <= len(A) for kept in runner.session.checkpoints.all)
    assert runner.session.drafter_state.covered == rows  # the drafter is taken back by itself
    runner.rewind_drafter(len(A))
    invariant(runner)
    assert row(runner.produce(30, len(A))) == expected(runner.model, [*A, 30])  # type: ignore[arg-type]


def test_drafting_off_the_cursor_is_refused() -> None:
    runner = drafting()
    turn(runner, A)
    for position in (len(A), len(A) - 2):
        with pytest.raises(ProducerError, match="cursor is 8"):
            runner.draft_step(20, position)
    with pytest.raises(ProducerError, match="the last row is 8"):
        runner.prime_drafter(20, 7)
    blocks = drafting(block_passes=True)
    turn(blocks, A)
    with pytest.raises(ProducerError, match="next position is 9"):
        blocks.draft_block(20, 8, 3)
    for block in (0, 9):
        with pytest.raises(ProducerError, match="gives 1 to 8"):
            blocks.draft_block(20, 9, block)


def test_a_block_is_exactly_as_long_as_asked() -> None:
    runner = drafting("perfect", block_passes=True)
    done = turn(runner, A)
    for block in range(1, 9):
        assert len(draft(runner, best(done.row), block)) == block


def test_a_failing_drafter_taints_by_name() -> None:
    class Failing(ScriptedDrafter):
        def observe(self, *arguments: Any) -> None:
            raise MemoryError("no room")

    model = ScriptedModel()
    runner = scripted_runner(model, Failing(model.logits_of))
    with pytest.raises(ProducerError, match=r"ScriptedDrafter\(.*tokens 0 to 8 failed .*no room"):
        turn(runner, A)
    assert runner.session.fed_ids.tainted


def test_a_session_opened_without_the_drafter_gets_a_state_that_has_seen_nothing() -> None:
    model = ScriptedModel()
    plain = scripted_runner(model)
    text = turn(plain, A, 3).ids
    session = plain.session
    session.make_drafter_state = None
    runner = Runner(model, session, ScriptedDrafter(model.logits_of), prefix_reuse=True)
    done = turn(runner, [*text, 40])
    assert done.reuse.tokens == 0
    primed(runner)
    rounds(runner, done.row, 2)


@pytest.mark.parametrize("block_passes", [False, True])
def test_forks_draft_each_on_its_own(block_passes: bool) -> None:
    runner = drafting("alternating", block_passes=block_passes, recurrent=1)
    done = turn(runner, A)
    tokens = rounds(runner, done.row, 1)
    text = [*A, *tokens]
    fork = Runner(runner.model, runner.session.fork(), runner.drafter, prefix_reuse=True)
    rounds(runner, turn(runner, [*text, 40]).row, 2)
    rounds(fork, turn(fork, [*text, 41]).row, 2)
    primed(runner)
    primed(fork)

"""The reuse decision through the runner, and what taints; numbers are those of the behaviours."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from runner.turns import expected, invariant, row, start, turn

from turbospark.errors import ProducerError
from turbospark.runner.loops import prefill
from turbospark.runner.runner import Runner
from turbospark.testing import (
    ScriptedModel,
    ScriptedProducer,
    hashed_logits,
    scripted_engine,
    scripted_runner,
)

A = [1, 2, 3, 4, 5, 6, 7, 8]


def fed(runner: Runner, prompt: list[int] = A, reply: int = 0) -> list[int]:
    return turn(runner, prompt, reply).ids


def states(runner: Runner) -> list[Any]:
    return [cache.state[0] for cache in runner.session.caches if cache.recurrent]


def test_11_reuse_that_is_off_keeps_nothing_and_moves_nothing() -> None:
    model = ScriptedModel()
    runner = Runner(model, scripted_runner(model).session)
    fed(runner)
    reuse = runner.try_reuse_prefix([*A, 9])
    assert (reuse.tokens, reuse.reason) == (0, "prefix reuse is off")
    assert runner.session.position == len(A)


def test_12_a_pure_continuation_keeps_all_and_rewinds_nothing() -> None:
    runner = scripted_runner()
    fed(runner)
    assert runner.try_reuse_prefix([*A, 9]).tokens == len(A)
    assert runner.session.position == len(A)
    assert all(cache.rewinds == [] for cache in runner.session.caches)


@pytest.mark.parametrize("chunk", [0, 1, 3, None])
def test_13_a_divergence_takes_rows_back_and_goes_on_as_if_cold(chunk: int | None) -> None:
    runner = scripted_runner()
    fed(runner)
    prompt = [1, 2, 3, 40, 41]
    done = turn(runner, prompt, 3, chunk)
    assert done.reuse.tokens == 3
    assert done.row == expected(runner.model, done.ids)  # type: ignore[arg-type]
    invariant(runner)


def test_14_a_record_ahead_of_the_caches_keeps_nothing() -> None:
    runner = scripted_runner()
    fed(runner)
    for cache in runner.session.caches:
        cache.rewind(3)
    reuse = runner.try_reuse_prefix([*A, 9])
    assert reuse.tokens == 0
    assert "hold 5 tokens where the record has 8" in reuse.reason


@pytest.mark.parametrize("layers", [1, 2])
def test_15_a_recurrent_state_without_checkpoints_is_never_taken_back(layers: int) -> None:
    runner = scripted_runner(ScriptedModel(recurrent=layers), checkpoint_bytes=0)
    fed(runner)
    before = states(runner)
    reuse = runner.try_reuse_prefix([1, 2, 3, 40])
    assert reuse.tokens == 0
    assert "recurrent layers cannot go back to token 3" in reuse.reason
    assert runner.session.position == len(A)
    assert all(now is then for now, then in zip(states(runner), before, strict=True))


def test_15_with_checkpoints_it_goes_back_to_the_last_one_before() -> None:
    model = ScriptedModel(recurrent=2)
    runner = scripted_runner(model, checkpoint_every=3)
    turn(runner, A, 4, chunk=3)
    done = turn(runner, [1, 2, 3, 4, 40, 41], 3)
    assert done.reuse.tokens == 3
    assert "checkpoint at 3" in done.reuse.reason
    assert done.row == expected(model, done.ids)
    invariant(runner)


def test_16_a_recurrent_family_continues_without_going_back() -> None:
    runner = scripted_runner(ScriptedModel(recurrent=1), checkpoint_bytes=0)
    ids = fed(runner, A, 3)
    assert turn(runner, [*ids, 50], 2).reuse.tokens == len(ids)
    invariant(runner)


class SecondRecurrentCache:
    """Another family's recurrent cache: it says so, and shares no class with the first."""

    recurrent = True

    def __init__(self) -> None:
        self.offset, self.nbytes = 0, 8
        self.state: tuple[Any, ...] = ()
        self.placed: list[int] = []

    def max_rewind(self) -> int:
        return 10**6  # it would let rows-only checks pass

    def place(self, offset: int, state: tuple[Any, ...]) -> None:
        self.offset, self.state = offset, state
        self.placed.append(offset)


class SecondRecurrentModel(ScriptedModel):
    def make_caches(self, max_context: int, slack: int) -> list[Any]:
        return [*super().make_caches(max_context, slack), SecondRecurrentCache()]

    def __call__(self, tokens: Any, caches: Any, **options: Any) -> Any:
        output = super().__call__(tokens, caches[:-1], **options)
        caches[-1].offset, caches[-1].state = caches[0].offset, (tokens,)
        return output


@pytest.mark.parametrize(("budget", "kept"), [(0, 0), (1 << 20, 3)])
def test_17_a_second_recurrent_family_is_held_to_the_same(budget: int, kept: int) -> None:
    runner = scripted_runner(SecondRecurrentModel(), checkpoint_bytes=budget, checkpoint_every=3)
    turn(runner, A, 0, chunk=3)
    assert runner.try_reuse_prefix([1, 2, 3, 4, 40]).tokens == kept
    assert runner.session.caches[-1].placed == ([3] if kept else [])


@pytest.mark.parametrize(("back", "kept"), [(3, 5), (4, 0)])
def test_18_a_wrapped_ring_goes_back_by_its_slack_and_no_further(back: int, kept: int) -> None:
    model = ScriptedModel(reach=3)
    runner = scripted_runner(model)
    fed(runner)
    done = turn(runner, [*A[: len(A) - back], 50, 51])
    assert done.reuse.tokens == kept
    assert done.row == expected(model, done.ids)
    if not kept:
        assert "going back 4 tokens is more than the 3" in done.reuse.reason


@pytest.mark.parametrize("back", range(1, 8))
def test_19_a_ring_that_never_wraps_goes_back_anywhere(back: int) -> None:
    runner = scripted_runner(ScriptedModel(reach=None))
    fed(runner)
    assert runner.try_reuse_prefix([*A[: len(A) - back], 50, 51]).tokens == len(A) - back


def fail_produce(runner: Runner) -> None:
    runner.produce(66, len(A))


def fail_chunk(runner: Runner) -> None:
    runner.prefill_chunk([65, 66, 67], len(A))


def fail_verify(runner: Runner) -> None:
    runner.verify([65, 66, 67], len(A))


@pytest.mark.parametrize(
    "fail",
    [
        pytest.param(fail_produce, id="20_produce"),
        pytest.param(fail_chunk, id="21_prefill_chunk"),
        pytest.param(fail_verify, id="22_verify"),
    ],
)
@pytest.mark.parametrize("recurrent", [0, 2])
def test_20_21_22_a_failed_pass_taints_and_the_next_turn_feeds_all(
    fail: Callable[[Runner], None], recurrent: int
) -> None:
    model = ScriptedModel(recurrent=recurrent, fail_on=66)
    runner = scripted_runner(model)
    fed(runner)
    with pytest.raises(ProducerError, match="scripted to fail"):
        fail(runner)
    assert runner.session.fed_ids.tainted
    done = turn(runner, [*A, 9], 2)
    assert done.reuse.tokens == 0
    assert "failed" in done.reuse.reason
    assert done.row == expected(model, done.ids)
    assert not runner.session.fed_ids.tainted


@pytest.mark.parametrize("recurrent", [0, 2])
def test_22_a_failed_verify_leaves_the_caches_where_they_were(recurrent: int) -> None:
    runner = scripted_runner(ScriptedModel(recurrent=recurrent, fail_on=66))
    fed(runner)
    before = states(runner)
    with pytest.raises(ProducerError):
        runner.verify([65, 66, 67], len(A))
    assert {cache.offset for cache in runner.session.caches} == {len(A)}
    assert runner.session.caches[0].ids == A
    assert all(now is then for now, then in zip(states(runner), before, strict=True))
    assert runner.session.open_round is None


def test_22_an_interrupted_verify_taints_too() -> None:
    class Interrupted(ScriptedModel):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            output = super().__call__(*arguments, **options)
            if options["logits"] == "all":
                raise KeyboardInterrupt
            return output

    runner = scripted_runner(Interrupted())
    fed(runner)
    with pytest.raises(KeyboardInterrupt):
        runner.verify([5, 6], len(A))
    assert runner.session.fed_ids.tainted


def test_23_images_forbid_reuse_and_leave_parked_sessions_alone() -> None:
    runner = scripted_runner(slots=2)
    first = fed(runner, A, 3)
    fed(runner, [9, 9, 9, 9])
    live, parked = runner.session, runner.pool.parked
    runner.set_prompt_vision({2: "rows"})
    reuse = runner.try_reuse_prefix([*first, 50])
    assert reuse.tokens == 0
    assert "images" in reuse.reason
    assert runner.session is live
    assert runner.pool.parked == parked
    assert parked[0].fed_ids.ids == first


def test_24_clearing_the_images_does_not_lift_the_taint() -> None:
    runner = scripted_runner()
    fed(runner)
    runner.set_prompt_vision({2: "rows"})
    runner.clear_prompt_vision()
    reuse = runner.try_reuse_prefix([*A, 9])
    assert reuse.tokens == 0
    assert "image rows" in reuse.reason
    runner.reset()
    assert not runner.session.fed_ids.tainted


@pytest.mark.parametrize("slots", [1, 2])
def test_25_images_outlive_the_reset_that_begins_their_turn(slots: int) -> None:
    runner = scripted_runner(slots=slots)
    fed(runner)
    runner.set_prompt_vision({2: "rows"})
    filled = prefill(runner, [*A, 9])
    assert filled.reuse.tokens == 0
    assert runner.session.fed_ids.tainted
    assert runner.traits.prompt_vision
    assert runner.try_reuse_prefix([*A, 9, 9]).tokens == 0
    runner.clear_prompt_vision()
    assert runner.try_reuse_prefix([*A, 9, 9]).tokens == 0


def test_26_the_same_ids_with_another_image_are_never_reused() -> None:
    runner = scripted_runner(slots=3)
    for image in ("first", "second"):
        runner.set_prompt_vision({2: image})
        assert start(runner, A).tokens == 0
        runner.prefill_chunk(A, 0)
        runner.clear_prompt_vision()
    assert turn(runner, A).reuse.tokens == 0


@pytest.mark.parametrize("claimed", [7, 8, 50])
def test_27_the_loops_always_feed_the_last_token(claimed: int) -> None:
    producer = ScriptedProducer(hashed_logits(97), overclaim=claimed)
    filled = prefill(producer, A)
    assert producer.fed == A
    assert filled.fed == 1


def test_28_a_failure_without_the_head_leaves_the_head_on() -> None:
    model = ScriptedModel(fail_on=66)
    runner = scripted_runner(model)
    with pytest.raises(ProducerError):
        runner.produce_prefill(66, 0)
    runner.reset()
    runner.produce_prefill(1, 0)
    assert row(runner.produce(2, 1)) == expected(model, [1, 2])
    assert [call[2] for call in model.calls] == ["none", "none", "last"]


def test_a_prompt_token_without_logits_counts_all_the_same() -> None:
    runner = scripted_runner()
    runner.produce_prefill(1, 0)
    runner.produce_prefill(2, 1)
    assert runner.session.fed_ids.ids == [1, 2]
    assert runner.session.position == 2


def test_a_prompt_of_another_text_at_its_first_token_starts_over() -> None:
    runner = scripted_runner()
    fed(runner)
    done = turn(runner, [9, 2, 3, 4], 2)
    assert done.reuse.tokens == 0
    assert runner.session.fed_ids.ids == done.ids
    assert done.row == expected(runner.model, done.ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("recurrent", [0, 1])
@pytest.mark.parametrize("prompt", [[4], A])
def test_the_same_prompt_again_and_again_gives_the_same_row(
    prompt: list[int], recurrent: int
) -> None:
    model = ScriptedModel(recurrent=recurrent, reach=3)
    runner = scripted_runner(model)
    rows = [turn(runner, prompt).row for _ in range(3)]
    assert rows == [expected(model, prompt)] * 3
    invariant(runner)


def test_a_row_does_not_depend_on_what_was_run_before() -> None:
    rng = np.random.default_rng(3)
    for recurrent in (0, 1):
        model = ScriptedModel(recurrent=recurrent, reach=4)
        runner = scripted_runner(model, slots=2, checkpoint_every=3)
        for _ in range(60):
            prompt = rng.integers(0, 2, rng.integers(1, 12)).tolist()
            done = turn(runner, prompt, int(rng.integers(0, 4)), int(rng.integers(0, 5)))
            assert done.row == expected(model, done.ids)
            invariant(runner)


def test_rows_taken_back_without_their_recurrent_state_are_not_the_same_text() -> None:
    """What would happen if recurrent layers were passed over: the scripted model notices."""
    runner = scripted_runner(ScriptedModel(recurrent=1))
    fed(runner)
    for cache in runner.session.caches[:2]:
        cache.rewind(3)
    runner.session.caches[2].place(5, runner.session.caches[2].state)
    runner.session.fed_ids.rewind_to(5)
    with pytest.raises(ProducerError, match="recurrent state is not that of the tokens"):
        runner.produce(9, 5)


def test_the_state_of_a_pass_is_computed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that waits for the next pass would hold on to all of this one."""
    runner = scripted_runner(ScriptedModel(recurrent=2))
    computed: list[int] = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: computed.extend(map(id, arrays)))
    for feed in (runner.produce_prefill, runner.produce):
        feed(1, runner.session.position)
        assert {id(state) for state in states(runner)} <= set(computed)


def test_the_end_of_a_turn_is_kept() -> None:
    runner = scripted_runner(ScriptedModel(recurrent=1))
    ids = turn(runner, A, 5).ids
    longer = turn(runner, [*ids, *range(100, 130)], 2).ids
    done = turn(runner, [*longer[: len(ids) + 5], 90, 91])
    assert done.reuse.tokens == len(ids)


def test_a_prompts_end_is_kept_a_little_before_it() -> None:
    """So that a template that rewrites the end of a prompt costs no more than that end."""
    model = ScriptedModel(recurrent=1)
    runner = scripted_runner(model)
    prompt = list(range(40))
    ids = turn(runner, prompt, 3).ids
    assert [call[1] for call in model.calls[:2]] == [24, 16]
    done = turn(runner, [*ids[:37], 90, 91, 92])
    assert done.reuse.tokens == 24
    assert turn(runner, prompt).reuse.tokens == 24
    short = scripted_runner(model)
    ids = turn(short, prompt[:9], 3).ids
    assert turn(short, [*ids[:10], 90]).reuse.tokens == 9
    plain = scripted_runner(ScriptedModel())
    turn(plain, prompt)
    assert [call[1] for call in plain.model.calls] == [40]  # type: ignore[attr-defined]


def test_a_new_turn_closes_the_one_left_between_two_tokens() -> None:
    runner = scripted_runner(slots=2)
    closed: list[str] = []
    turn(runner, [1, 2, 3])
    runner.session.suspended = lambda: closed.append("parked")
    runner.reset()
    runner.session.suspended = lambda: closed.append("live")
    runner.begin_turn()
    assert closed == ["live", "parked"]
    runner.begin_turn()
    assert closed == ["live", "parked"]


def test_what_a_step_calls_cannot_drive_the_same_session() -> None:
    """Else a prompt could go on in the middle of another text."""
    engine = scripted_engine()
    caught: list[str] = []

    def again(*_given: Any) -> None:
        with pytest.raises(ProducerError, match="in the midst of a step") as refused:
            engine.generate("another", max_tokens=2)
        caught.append(str(refused.value))
        assert len(engine.session().send("on its own", max_tokens=2).token_ids) == 2

    def process(_tokens: Any, logits: Any) -> Any:
        again()
        return logits

    plain = engine.generate("hello there", max_tokens=3)
    for options in ({"prompt_progress_callback": again}, {"logits_processors": [process]}):
        given = scripted_engine().generate("hello there", max_tokens=3)
        assert engine.generate("hello there", max_tokens=3, **options) == given == plain
    assert len(caught) == 5
    assert engine.generate("hello there", max_tokens=3) == plain


def test_a_step_that_fails_leaves_the_session_free() -> None:
    runner = scripted_runner()

    def fail() -> None:
        with runner.stepping():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    runner.begin_turn()
    with runner.stepping(), pytest.raises(ProducerError, match="midst of a step"):
        runner.begin_turn()

"""The producer over a live session: reuse, taint, refusals."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turbospark.errors import ContextLengthError, NonFiniteError, ProducerError
from turbospark.protocols import ForwardOutput
from turbospark.runner.loops import prefill
from turbospark.runner.runner import Runner
from turbospark.sessions.session import Session
from turbospark.testing import ScriptedModel


def make(model: ScriptedModel | None = None, *, reuse: bool = True, context: int = 99) -> Runner:
    model = model or ScriptedModel()
    return Runner(
        model, Session(lambda: model.make_caches(context, 0), context), prefix_reuse=reuse
    )


def row(logits: mx.array | None) -> list[float]:
    assert logits is not None
    return np.asarray(logits).tolist()


def cold(prompt: list[int]) -> list[float]:
    return row(prefill(make(), prompt).logits)


def test_reuse_off_keeps_nothing_and_moves_nothing() -> None:
    runner = make(reuse=False)
    prefill(runner, [1, 2, 3])
    assert runner.try_reuse_prefix([1, 2, 3, 4]).tokens == 0
    assert runner.session.position == 3


def test_a_continuation_is_kept_without_a_rewind() -> None:
    runner = make()
    prefill(runner, [1, 2, 3])
    filled = prefill(runner, [1, 2, 3, 4, 5])
    assert (filled.reuse.tokens, filled.fed) == (3, 2)
    assert runner.session.caches[0].rewinds == []
    assert row(filled.logits) == cold([1, 2, 3, 4, 5])


def test_a_divergence_rewinds_in_place() -> None:
    runner = make()
    prefill(runner, [1, 2, 3, 4, 5])
    filled = prefill(runner, [1, 2, 9, 9])
    assert (filled.reuse.tokens, filled.fed) == (2, 2)
    assert runner.session.fed_ids.ids == [1, 2, 9, 9]
    assert row(filled.logits) == cold([1, 2, 9, 9])


def test_a_shallow_match_is_reused_in_place() -> None:
    runner = make()
    prefill(runner, list(range(13)))
    assert prefill(runner, [0, 1, *range(40, 51)]).reuse.tokens == 2


@pytest.mark.parametrize(("back", "kept"), [(3, 5), (4, 0)])
def test_a_ring_is_taken_back_as_far_as_it_can_and_no_further(back: int, kept: int) -> None:
    runner = make(ScriptedModel(reach=3))
    prefill(runner, list(range(8)))
    prompt = [*range(8 - back), 50, 51]
    filled = prefill(runner, prompt)
    assert filled.reuse.tokens == kept
    assert row(filled.logits) == cold(prompt)


def test_the_same_prompt_twice_feeds_its_last_token_again() -> None:
    runner = make()
    first = row(prefill(runner, [4, 5, 6]).logits)
    filled = prefill(runner, [4, 5, 6])
    assert filled.fed == 1
    assert row(filled.logits) == first
    one = make()
    assert row(prefill(one, [4]).logits) == row(prefill(one, [4]).logits)


def test_conversations_in_a_row_do_not_touch_each_other() -> None:
    runner = make()
    prompts = [[1, 2, 3, 4], [1, 2, 8], [9, 2, 3], [1, 2, 3, 4, 5]]
    assert [row(prefill(runner, p, chunk=2).logits) for p in prompts] == [cold(p) for p in prompts]


def test_a_failed_produce_taints_and_the_next_prompt_starts_over() -> None:
    runner = make(ScriptedModel(fail_on=66))
    prefill(runner, [1, 2])
    with pytest.raises(ProducerError, match=r"tokens 2 to 2 failed .*scripted to fail"):
        runner.produce(66, 2)
    assert runner.session.fed_ids.tainted
    filled = prefill(runner, [1, 2, 3])
    assert filled.reuse.tokens == 0
    assert "failed" in filled.reuse.reason
    assert row(filled.logits) == cold([1, 2, 3])
    assert not runner.session.fed_ids.tainted


def test_a_failed_chunk_taints() -> None:
    runner = make(ScriptedModel(fail_on=66))
    with pytest.raises(ProducerError):
        prefill(runner, [1, 66, 2, 3], chunk=2)
    assert runner.session.fed_ids.tainted


def test_a_failed_headless_pass_leaves_no_flag_behind() -> None:
    model = ScriptedModel(fail_on=66)
    runner = make(model)
    runner.reset()
    with pytest.raises(ProducerError):
        runner.produce_prefill(66, 0)
    runner.reset()
    assert row(runner.produce(1, 0)) == cold([1])
    assert model.calls[-1][2] == "last"


def test_an_interrupt_taints_too() -> None:
    class Interrupted(ScriptedModel):
        def __call__(self, *arguments: object, **options: object) -> object:  # type: ignore[override]
            raise KeyboardInterrupt

    runner = make(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        runner.produce(1, 0)
    assert runner.session.fed_ids.tainted


@pytest.mark.parametrize("call", ["produce", "produce_prefill"])
def test_a_position_off_the_cursor_is_refused_before_anything_moves(call: str) -> None:
    runner = make()
    prefill(runner, [1, 2])
    with pytest.raises(ProducerError, match=r"position 3 .* next position is 2"):
        getattr(runner, call)(5, 3)
    with pytest.raises(ProducerError, match="position 1"):
        runner.prefill_chunk([5], 1)
    with pytest.raises(ProducerError, match="at least one"):
        runner.prefill_chunk([], 2)
    assert runner.session.fed_ids.ids == [1, 2]
    assert not runner.session.fed_ids.tainted


def test_a_full_context_is_refused_before_anything_moves() -> None:
    runner = make(context=3)
    prefill(runner, [1, 2, 3])
    with pytest.raises(ContextLengthError):
        runner.produce(4, 3)
    assert runner.session.fed_ids.ids == [1, 2, 3]
    assert not runner.session.fed_ids.tainted


@pytest.mark.parametrize("bad_layer", [0, 2, 4])
def test_non_finite_logits_name_the_first_bad_layer_and_token(bad_layer: int) -> None:
    runner = make(ScriptedModel(poison=66, bad_layer=bad_layer))
    pattern = f"position 3 hold NaN .* layer {bad_layer} \\(of 5\\) at token 2"
    with pytest.raises(NonFiniteError, match=pattern):
        prefill(runner, [1, 2, 66, 3])
    assert runner.session.fed_ids.tainted


def test_a_layer_is_found_across_the_chunks_of_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turbospark.runner.forward._DIAGNOSIS_CHUNK", 2)
    runner = make(ScriptedModel(poison=66))
    with pytest.raises(NonFiniteError, match=r"layer 3 \(of 5\) at token 4"):
        prefill(runner, [1, 2, 3, 4, 66, 5, 6], chunk=3)


def test_a_stream_of_float16_is_told_of() -> None:
    class Half(ScriptedModel):
        def __call__(self, *arguments: Any, **options: Any) -> ForwardOutput:
            output = super().__call__(*arguments, **options)
            taps = {layer: tap.astype(mx.float16) for layer, tap in output.taps.items()}
            return replace(output, taps=taps)

    with pytest.raises(NonFiniteError, match=r"token 0; the stream is float16, .* bfloat16"):
        prefill(make(Half(poison=66)), [66])
    with pytest.raises(NonFiniteError, match=r"token 0$"):
        prefill(make(ScriptedModel(poison=66)), [66])


def test_finite_layers_put_the_blame_on_the_head() -> None:
    runner = make(ScriptedModel(poison=66, bad_layer=5))
    with pytest.raises(NonFiniteError, match="output head"):
        prefill(runner, [66])

"""The prefill and decode loops over scripted producers."""

import pytest

from turbospark.errors import OptionError
from turbospark.protocols import Phase
from turbospark.runner.loops import decode, prefill
from turbospark.runner.runner import Runner
from turbospark.runner.sink import TokenSink
from turbospark.sampling.select import Chooser
from turbospark.sessions.session import Session
from turbospark.settings import GenerationConfig
from turbospark.testing import ByteDetokenizer, ScriptedModel, ScriptedProducer, hashed_logits

VOCAB = 259
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def make_runner(model: ScriptedModel | None = None, **options: bool) -> Runner:
    model = model or ScriptedModel()
    return Runner(model, Session(lambda: model.make_caches(99, 0), 99), **options)


def greedy(producer: object, prompt: list[int], count: int, **options: object) -> list[int]:
    filled = prefill(producer, prompt, **options)  # type: ignore[arg-type]
    sink = TokenSink(prompt, ByteDetokenizer(), max_tokens=count)
    chooser = Chooser(GenerationConfig(), VOCAB)
    assert filled.logits is not None
    return [step.committed.token for step in decode(producer, filled.logits, chooser, sink)]  # type: ignore[arg-type]


def test_a_producer_without_chunks_is_fed_one_by_one_and_its_head_runs_once() -> None:
    producer = ScriptedProducer(hashed_logits(VOCAB))
    assert prefill(producer, PROMPT[:3]).fed == 3
    assert producer.calls == ["reset", "produce_prefill", "produce_prefill", "produce"]


def test_chunks_asked_of_a_producer_without_them_are_refused() -> None:
    producer = ScriptedProducer(hashed_logits(VOCAB))
    with pytest.raises(OptionError, match="prefill_chunk=4"):
        prefill(producer, PROMPT, chunk=4)
    assert producer.calls == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50, None])
def test_chunk_size_does_not_change_the_text(chunk: int | None) -> None:
    plain = greedy(ScriptedProducer(hashed_logits(VOCAB)), PROMPT, 6)
    assert greedy(make_runner(), PROMPT, 6, chunk=chunk) == plain


def test_the_prompt_is_prefill_and_sampled_tokens_are_decode() -> None:
    model = ScriptedModel()
    greedy(make_runner(model), PROMPT, 3, chunk=3)
    assert model.calls == [
        (Phase.PREFILL, 3, "none"),
        (Phase.PREFILL, 3, "none"),
        (Phase.PREFILL, 1, "last"),
        (Phase.DECODE, 1, "last"),
        (Phase.DECODE, 1, "last"),
    ]


def test_a_claim_of_the_whole_prompt_is_clamped() -> None:
    producer = ScriptedProducer(hashed_logits(VOCAB), overclaim=len(PROMPT))
    assert prefill(producer, PROMPT).fed == 1
    assert producer.calls == ["produce"]
    single = ScriptedProducer(hashed_logits(VOCAB), overclaim=1)
    assert prefill(single, [4]).fed == 1
    assert single.calls == ["reset", "produce"]


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_progress_counts_from_0_and_ends_at_the_total(chunk: int) -> None:
    seen: list[tuple[int, int]] = []
    prefill(make_runner(), PROMPT, chunk=chunk, progress=lambda *at: seen.append(at))
    assert seen == [*((n, 7) for n in range(0, 7, chunk)), (7, 7)]


def test_progress_is_absolute_when_a_prefix_is_reused() -> None:
    runner = make_runner(prefix_reuse=True)
    prefill(runner, PROMPT[:4], chunk=2)
    seen: list[tuple[int, int]] = []
    filled = prefill(runner, PROMPT, chunk=2, progress=lambda *at: seen.append(at))
    assert seen == [(4, 7), (6, 7), (7, 7)]
    assert filled.reuse.tokens == 4
    assert filled.fed == 3


@pytest.mark.parametrize("stop_at", [0, 2, 4, 7])
def test_progress_may_cancel_at_any_chunk_and_the_rest_continues(stop_at: int) -> None:
    runner = make_runner(prefix_reuse=True)
    filled = prefill(runner, PROMPT, chunk=2, progress=lambda done, _: done < stop_at)
    assert filled.logits is None
    assert runner.session.fed_ids.ids == PROMPT[:stop_at]
    assert runner.session.position == stop_at
    again = prefill(runner, PROMPT, chunk=2)
    assert again.reuse.tokens == min(stop_at, 6)
    cold = prefill(make_runner(), PROMPT)
    assert again.logits.tolist() == cold.logits.tolist()  # type: ignore[union-attr]


def test_cancelled_is_polled_after_the_chunk_is_recorded() -> None:
    runner = make_runner()
    polls: list[int] = []

    def cancelled() -> bool:
        polls.append(runner.session.position)
        return len(polls) == 2

    assert prefill(runner, PROMPT, chunk=3, cancelled=cancelled).logits is None
    assert polls == [0, 3]
    assert runner.session.fed_ids.ids == PROMPT[:3]


def test_an_error_of_the_callback_passes_and_leaves_what_was_fed() -> None:
    runner = make_runner(prefix_reuse=True)

    def fail(done: int, _total: int) -> None:
        if done == 4:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        prefill(runner, PROMPT, chunk=2, progress=fail)
    assert runner.session.fed_ids.ids == PROMPT[:4]
    assert not runner.session.fed_ids.tainted


@pytest.mark.parametrize("after", [0, 1, 5])
def test_closing_after_any_token_leaves_a_prefix_that_continues_as_if_cold(after: int) -> None:
    runner = make_runner(prefix_reuse=True)
    filled = prefill(runner, PROMPT)
    sink = TokenSink(PROMPT, ByteDetokenizer(), max_tokens=20)
    assert filled.logits is not None
    steps = decode(runner, filled.logits, Chooser(GenerationConfig(), VOCAB), sink)
    tokens = [next(steps).committed.token for _ in range(after)]
    steps.close()
    fed = runner.session.fed_ids.ids
    assert fed == [*PROMPT, *tokens][: len(fed)]
    assert len(fed) == runner.session.position == len(PROMPT) + max(after - 1, 0)
    longer = [*PROMPT, *tokens, 3, 4]
    assert greedy(runner, longer, 5) == greedy(make_runner(), longer, 5)


def test_the_token_that_ends_is_never_fed() -> None:
    runner = make_runner()
    tokens = greedy(runner, PROMPT, 4)
    assert runner.session.fed_ids.ids == [*PROMPT, *tokens[:-1]]
    assert all(cache.offset == len(PROMPT) + 3 for cache in runner.session.caches)

"""One generation from prompt ids to responses: all is checked first, then state moves."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.runner.admission import check_budget, check_ids, check_stop_ids
from turbospark.runner.loops import Prefilled, Step, decode, prefill
from turbospark.runner.options import CallOptions
from turbospark.runner.prompt import TextCodec
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.runner.sink import FinishReason, TokenSink
from turbospark.sampling.select import Chooser, check_callable

_FINISH = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """A generation that was admitted and has not begun.

    Attributes:
        prompt: ids, every one of the vocabulary.
        chooser: how tokens are chosen.
        sink: where they go.
        chunk: prompt tokens of one pass.
        options: the call's own.
    """

    prompt: list[int]
    chooser: Chooser
    sink: TokenSink
    chunk: int
    options: CallOptions


def admit(
    runner: Runner,
    tokenizer: TextCodec,
    prompt: Sequence[Any],
    options: CallOptions,
    *,
    stop_ids: frozenset[int],
    chunk: int,
) -> Generation:
    """Check everything that can be refused; nothing has moved when this returns or raises.

    Raises:
        PromptError: the prompt is empty or holds an id outside the vocabulary.
        ContextLengthError: prompt and budget exceed the session's max_context.
        OptionError: an option is out of range.
    """
    vocab_size = runner.model.vocab_size
    ids = check_ids(prompt, vocab_size)
    config = options.generation
    budget = check_budget(len(ids), config.max_tokens, runner.session.max_context)
    chooser = Chooser(
        config,
        vocab_size,
        logit_bias=options.logit_bias,
        processors=() if options.logits_processors is None else options.logits_processors,
        sampler=options.sampler,
    )
    if options.prompt_progress_callback is not None:
        check_callable("prompt_progress_callback", options.prompt_progress_callback)
    sink = TokenSink(
        ids,
        tokenizer.detokenizer(),
        stop_ids=stop_ids | check_stop_ids(options.stop_token_ids, vocab_size),
        stops=config.stop,
        max_tokens=budget,
    )
    return Generation(ids, chooser, sink, options.prefill_chunk or chunk, options)


def run(
    runner: Runner,
    generation: Generation,
    *,
    on_step: Callable[[GenerationResponse], None] | None = None,
) -> Iterator[GenerationResponse]:
    """Run an admitted generation; one response a token.

    Closing the iterator leaves the session with the prompt and the tokens fed so far. A later
    generation on the same runner ends this one: its next step raises ProducerError.

    Args:
        runner: advanced.
        generation: used up.
        on_step: called with every response before it is given out.
    """
    began = time.perf_counter()
    sink = generation.sink
    with runner.lock:
        turn = runner.begin_turn()
        fed = prefill(
            runner,
            generation.prompt,
            chunk=generation.chunk,
            progress=generation.options.prompt_progress_callback,
        )
    report = _Reporter(generation, fed, began)
    if fed.logits is None:
        yield report.cancelled()
        return
    steps = decode(runner, fed.logits, generation.chooser, sink)
    while True:
        with runner.lock:
            runner.check_turn(turn)
            step = next(steps, None)
            if step is None:
                return
            response = report.step(step)
            runner.session.pending = step.choice.token
            if on_step is not None:
                on_step(response)
        yield response


def collect(responses: Iterator[GenerationResponse]) -> GeneratedText:
    """Run a generation to its end."""
    parts: list[str] = []
    last = None
    for response in responses:
        parts.append(response.text)
        last = response
    assert last is not None
    return GeneratedText("".join(parts), last)


class _Reporter:
    """Counts and times of one generation."""

    def __init__(self, generation: Generation, fed: Prefilled, began: float) -> None:
        self._prompt_tokens = len(generation.prompt)
        self._fed = fed
        self._began = began
        self._ids: list[int] = []
        self._decode_seconds = 0.0
        self._ttft = 0.0

    def step(self, step: Step) -> GenerationResponse:
        committed, choice = step.committed, step.choice
        self._ids.append(committed.token)
        if committed.index == 0:
            self._ttft = time.perf_counter() - self._began
        else:
            self._decode_seconds += step.seconds
        reason = committed.reason
        stop: str | int | None = committed.stop
        if reason is FinishReason.STOP_TOKEN:
            stop = committed.token
        return self._response(
            text=committed.text,
            token=committed.token,
            logits=choice.logits,
            finish_reason=None if reason is None else _FINISH[reason],
            stop_reason=stop,
            logprob=choice.logprob,
            top_logprobs=choice.top_logprobs,
        )

    def cancelled(self) -> GenerationResponse:
        return self._response(text="", token=None, logits=None, finish_reason="cancelled")

    def _response(self, **values: Any) -> GenerationResponse:
        count, fed = len(self._ids), self._fed
        return GenerationResponse(
            prompt_tokens=self._prompt_tokens,
            prompt_tps=fed.fed / fed.seconds if fed.seconds > 0 else 0.0,
            generation_tokens=count,
            generation_tps=(count - 1) / self._decode_seconds if count > 1 else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            ttft=self._ttft,
            reused_tokens=self._prompt_tokens - fed.fed
            if fed.logits is not None
            else fed.reuse.tokens,
            reuse_reason=fed.reuse.reason,
            evicted=fed.reuse.evicted,
            ids=self._ids,
            **values,
        )

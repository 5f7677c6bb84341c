"""One generation from prompt ids to responses: all is checked first, then state moves."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.errors import ProducerError
from turbospark.runner.admission import check_budget, check_ids, check_stop_ids
from turbospark.runner.ahead import decode_ahead
from turbospark.runner.drafting import choose_policy, open_drafting
from turbospark.runner.loops import Prefilled, decode, prefill
from turbospark.runner.options import CallOptions
from turbospark.runner.prompt import TextCodec
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.runner.sink import FinishReason, TokenSink
from turbospark.runner.speculative import Drafting
from turbospark.runner.token_step import NOTHING_DRAFTED, Step
from turbospark.sampling.device import DevicePicker, serves
from turbospark.sampling.select import Chooser, check_callable
from turbospark.sessions.session import Session
from turbospark.speculation.adaptive import BlockPolicy

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
        policy: how many tokens a round proposes; None where nothing is drafted.
    """

    prompt: list[int]
    chooser: Chooser
    sink: TokenSink
    chunk: int
    options: CallOptions
    policy: BlockPolicy | None = None


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

    Args:
        runner: asked, not moved.
        tokenizer: the model's.
        prompt: its ids.
        options: the call's own.
        stop_ids: ids that end the text.
        chunk: prompt tokens of one pass, where the call does not say.

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
    policy = None if options.draft == "off" else choose_policy(runner, options.draft_block)
    return Generation(ids, chooser, sink, options.prefill_chunk or chunk, options, policy)


def run(
    runner: Runner,
    generation: Generation,
    *,
    on_step: Callable[[GenerationResponse], None] | None = None,
) -> Iterator[GenerationResponse]:
    """Run an admitted generation; one response a token.

    Closing the iterator leaves the session with the prompt and the tokens fed so far. A later
    generation on the same runner ends this one: its next step raises ProducerError. What a step
    calls (samplers, callbacks) cannot drive the same runner.

    Args:
        runner: advanced.
        generation: used up.
        on_step: called with every response before it is given out.
    """
    began = time.perf_counter()
    with runner.lock:
        runner.begin_turn()
        with runner.stepping():
            fed = prefill(
                runner,
                generation.prompt,
                chunk=generation.chunk,
                progress=generation.options.prompt_progress_callback,
            )
        drafting, off_reason = open_drafting(runner, generation.chooser, generation.policy)
        report = _Reporter(generation, fed, began, drafting, off_reason)
        live = None
        if fed.logits is not None:
            live = _Suspended(runner.session, _steps(runner, generation, fed.logits, drafting))
    if live is None:
        yield report.cancelled()
        return
    try:
        while True:
            with runner.lock, runner.stepping():
                step = live.step()
                if step is None:
                    return
                response = report.step(step)
                if on_step is not None:
                    on_step(response)
            yield response
    finally:
        with runner.lock:
            live.close()


def _steps(
    runner: Runner, generation: Generation, logits: mx.array, drafting: Drafting | None
) -> Generator[Step]:
    chooser, sink = generation.chooser, generation.sink
    if drafting is None and runner.steps_ahead and serves(chooser):
        return decode_ahead(runner, logits, DevicePicker(chooser), sink)
    return decode(runner, logits, chooser, sink, drafting)


class _Suspended:
    """A generation between two of its tokens, which a later one may have to end."""

    def __init__(self, session: Session, steps: Generator[Step]) -> None:
        self._session, self._steps = session, steps
        self._last: int | None = None
        self._open = True
        session.suspended = self.close

    def step(self) -> Step | None:
        """The next token; None at the end.

        Raises:
            ProducerError: its session was closed, or a later use of it has ended this.
        """
        if not self._open and self._session.closed:
            raise ProducerError(
                "this generation was ended when its conversation was closed; read a reply to its "
                "end first, or keep the conversation open"
            )
        if not self._open:
            raise ProducerError(
                f"this generation was ended by a later use of {self._session!r}; use a session of "
                "its own for each text that runs beside another"
            )
        step = next(self._steps, None)
        if step is not None:  # a token that is given out belongs to the text and was not fed
            self._last = self._session.pending = step.choice.token
        return step

    def close(self) -> None:
        """Leave the session with the tokens given, the last of them pending."""
        if not self._open:
            return
        self._open = False
        self._session.suspended = None
        self._steps.close()
        if self._last is not None:
            self._session.pending = self._last


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

    def __init__(
        self,
        generation: Generation,
        fed: Prefilled,
        began: float,
        drafting: Drafting | None,
        off_reason: str | None,
    ) -> None:
        self._drafting = drafting
        self._off_reason = off_reason
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
            from_draft=step.from_draft,
        )

    def cancelled(self) -> GenerationResponse:
        return self._response(text="", token=None, logits=None, finish_reason="cancelled")

    def _response(self, **values: Any) -> GenerationResponse:
        count, fed, drafting = len(self._ids), self._fed, self._drafting
        drafts = NOTHING_DRAFTED if drafting is None else drafting.statistics
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
            drafted=drafts.drafted,
            accepted=drafts.accepted,
            accepted_per_position=drafts.accepted_per_position,
            rounds=drafts.rounds,
            rollbacks=drafts.rollbacks,
            draft_off_reason=self._off_reason if drafting is None else drafting.off_reason,
            **values,
        )

"""The two loops: prompt tokens in, sampled tokens out.

A loop knows a producer by its protocol alone. Between two steps producer and sink agree: what
was fed is a prefix of the sink's history.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from turbospark.errors import OptionError
from turbospark.protocols import ChunkedPrefillRunner, LogitProducer, Reuse
from turbospark.runner.sink import TokenSink, never
from turbospark.runner.speculative import Drafting
from turbospark.runner.token_step import NOTHING_DRAFTED, Step, Stopwatch
from turbospark.sampling.select import Choice, Chooser

Progress = Callable[[int, int], Any]
"""(tokens done, tokens in all) -> False to cancel; anything else goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """The outcome of a prompt's pass.

    Attributes:
        logits: [V] of the last token; None where the pass was cancelled.
        reuse: what the live state already stood for.
        fed: tokens that went through the model.
        seconds: how long that took.
    """

    logits: mx.array | None
    reuse: Reuse
    fed: int
    seconds: float


def prefill(
    producer: LogitProducer,
    prompt: Sequence[int],
    *,
    chunk: int | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] = never,
) -> Prefilled:
    """Feed a prompt, what the producer can reuse left out.

    Args:
        producer: advanced to the end of the prompt, or to the chunk at which it was cancelled.
        prompt: at least one id.
        chunk: tokens of one pass; None is all at once, or one by one where the producer has no
            chunks.
        progress: called with absolute counts before the first chunk and after each; ends at
            (total, total).
        cancelled: polled after each chunk.

    Raises:
        OptionError: chunks were asked for and the producer has none; nothing was fed.
        ProducerError: a pass failed; the producer's session is tainted.
    """
    chunked = _chunked(producer, chunk)
    began = time.perf_counter()
    total = len(prompt)
    reuse = producer.try_reuse_prefix(prompt)
    start = min(reuse.tokens, total - 1)
    if start == 0:
        producer.reset()
    reuse = replace(reuse, evicted=producer.session_slot_evicted())
    position = start
    stopped = _report(progress, position, total) or cancelled()
    logits = None
    while position < total and not stopped:
        end = min(total, position + ((chunk or total) if chunked else 1))
        logits = _feed(producer, chunked, prompt[position:end], position, end == total)
        position = end
        stopped = _report(progress, position, total) or cancelled()
    seconds = time.perf_counter() - began
    return Prefilled(None if stopped else logits, reuse, position - start, seconds)


def decode(
    producer: LogitProducer,
    logits: mx.array,
    chooser: Chooser,
    sink: TokenSink,
    drafting: Drafting | None = None,
) -> Generator[Step]:
    """Sample, commit and feed until the sink says why to end.

    Closing the iterator at any token is fine: the tokens fed are then the prompt and every token
    before the one just given.

    Args:
        producer: advanced by every token but the last.
        logits: [V] of the prompt's last token.
        chooser: how tokens are chosen.
        sink: takes them; `sink.history` is what was fed.
        drafting: makes several tokens of some passes; None is one a pass.
    """
    watch = Stopwatch()
    choice: Choice | None = chooser.choose(logits, sink.history, sink.prompt_tokens)
    while choice is not None:
        position = len(sink.history)
        committed = sink.commit(choice.token)
        drafts = NOTHING_DRAFTED if drafting is None else drafting.statistics
        yield Step(committed, choice, watch.pause(), drafts=drafts)
        if committed.reason is not None:
            return
        watch.resume()
        began = watch.spent
        proposals = [] if drafting is None else drafting.propose(choice.token, sink)
        if drafting is not None and proposals:
            choice = yield from drafting.round(choice.token, proposals, sink, watch, began)
            continue
        logits = producer.produce(choice.token, position)
        choice = chooser.choose(logits, sink.history, sink.prompt_tokens)
        if drafting is not None:
            drafting.policy.note_plain(watch.spent - began)


def _chunked(producer: LogitProducer, chunk: int | None) -> ChunkedPrefillRunner | None:
    if isinstance(producer, ChunkedPrefillRunner) and producer.supports_chunked_prefill():
        return producer
    if chunk is not None and chunk > 1:
        raise OptionError(
            f"prefill_chunk={chunk}: this model takes prompt tokens one by one; leave it out"
        )
    return None


def _feed(
    producer: LogitProducer,
    chunked: ChunkedPrefillRunner | None,
    tokens: Sequence[int],
    start: int,
    is_final: bool,
) -> mx.array | None:
    if chunked is not None:
        return chunked.prefill_chunk(tokens, start, is_final)
    if is_final:
        return producer.produce(tokens[0], start)
    producer.produce_prefill(tokens[0], start)
    return None


def _report(progress: Progress | None, done: int, total: int) -> bool:
    return progress is not None and progress(done, total) is False

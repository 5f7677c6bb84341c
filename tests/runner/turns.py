"""Turns over a scripted runner, step by step through the protocol alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark.protocols import Reuse
from turbospark.runner.runner import Runner
from turbospark.testing import ScriptedModel


@dataclass(frozen=True)
class Turn:
    """What came of a turn: `ids` were fed, `row` are the logits after them."""

    reuse: Reuse
    evicted: bool
    ids: list[int]
    row: list[float]


def row(logits: mx.array | None) -> list[float]:
    """Logits as plain numbers."""
    assert logits is not None
    return np.asarray(logits).tolist()


def best(logits: Sequence[float]) -> int:
    """The greedy token."""
    return int(np.argmax(logits))


def start(runner: Runner, prompt: Sequence[int]) -> Reuse:
    """Reuse, or reset."""
    reuse = runner.try_reuse_prefix(prompt)
    if not reuse.tokens:
        runner.reset()
    return reuse


def turn(runner: Runner, prompt: Sequence[int], reply: int = 0, chunk: int | None = None) -> Turn:
    """Feed a prompt in chunks, or token by token for chunk 0; then feed `reply` greedy tokens."""
    runner.begin_turn()
    reuse = start(runner, prompt)
    evicted = runner.session_slot_evicted()
    at, logits = reuse.tokens, None
    while at < len(prompt):
        if chunk == 0:
            last = at == len(prompt) - 1
            logits = runner.produce(prompt[at], at) if last else None
            if not last:
                runner.produce_prefill(prompt[at], at)
            at += 1
            continue
        end = len(prompt) if chunk is None else min(at + chunk, len(prompt))
        logits = runner.prefill_chunk(prompt[at:end], at, end == len(prompt))
        at = end
    numbers, ids = row(logits), list(prompt)
    for _ in range(reply):
        ids.append(best(numbers))
        numbers = row(runner.produce(ids[-1], len(ids) - 1))
    return Turn(reuse, evicted, ids, numbers)


def expected(model: ScriptedModel, ids: Sequence[int]) -> list[float]:
    """What the model says after these ids, whatever happened before."""
    return np.asarray(model.logits_of(list(ids)), dtype=np.float32).tolist()


def speculate(runner: Runner, anchor: int, block: int, *, keep: int | None = None) -> list[int]:
    """One greedy round after `anchor`; `keep` feeds fewer rows than the target agrees with.

    Returns:
        the ids fed, and the token that follows them.
    """
    base = runner.session.position
    proposals = draft(runner, anchor, block)
    feed = [anchor, *proposals]
    point = runner.checkpoint()
    verified = runner.verify(feed, base)
    said = [best(line) for line in np.asarray(verified.logits).tolist()]
    agreed = 1
    while agreed < len(feed) and said[agreed - 1] == feed[agreed]:
        agreed += 1
    agreed = agreed if keep is None else min(keep, agreed)
    if agreed < len(feed):
        runner.rollback_retaining(point, agreed, verified)
    if runner.draft_off_reason() is None:
        runner.rewind_drafter(base)
    runner.record_committed(feed[:agreed], base, verified)
    return [*feed[:agreed], said[agreed - 1]]


def draft(runner: Runner, anchor: int, block: int) -> list[int]:
    """Greedy proposals after `anchor`."""
    base = runner.session.position
    if runner.drafts_block_passes():
        return runner.draft_block(anchor, base, block)
    proposals: list[int] = []
    for step in range(block):
        token = proposals[-1] if proposals else anchor
        proposals.append(best(row(runner.draft_step(token, base - 1 + step))))
    return proposals


def invariant(runner: Runner) -> None:
    """The caches hold what the record says."""
    session = runner.session
    if session.fed_ids.tainted:
        return
    assert {cache.offset for cache in session.caches} == {len(session.fed_ids)}
    assert session.caches[0].ids == session.fed_ids.ids

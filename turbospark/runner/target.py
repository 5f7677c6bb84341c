"""The producer that a model and its sessions make together: reuse, taint, plain passes."""

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from turbospark.errors import ProducerError
from turbospark.protocols import CausalModel, Drafter, ForwardOutput, LogitRows, Phase, Reuse
from turbospark.runner.forward import advance, commit, last_row
from turbospark.runner.refusals import Traits, refusal
from turbospark.runner.step import CompiledModel, compiled_steps
from turbospark.sessions.pool import SessionPool
from turbospark.sessions.session import Session
from turbospark.speculation.adaptive import BlockPolicy
from turbospark.speculation.off import NoDrafter

IMAGES = "the session holds image rows, which token ids do not tell apart"
_LEAD = 16
"""Tokens before a prompt's end at which recurrent layers keep a checkpoint: a chat template may
write the end of a prompt otherwise once the reply stands behind it."""


class TargetRunner:
    """Drives a model over the live session of a pool, one token or one chunk at a time.

    Args:
        model: whose forward passes run.
        pool: of the conversations; a session alone is a pool that parks nothing.
        drafter: proposes tokens; by default nothing does.
        prefix_reuse: whether `try_reuse_prefix` may keep anything.
        prefer_reuse: what to give up for a turn where the drafter has not seen what the target
            could keep: drafting, or what was fed.
        lock: held while a step of a generation runs; runners that share one take turns.

    Raises:
        OptionError: the live session was opened for another model.

    Attributes:
        steps: the model as passes call it: compiled on a GPU.
        lock: see above; any one thread at a time may drive a runner.
        block_policy: what its generations have learnt about how many tokens to draft.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: SessionPool | Session,
        drafter: Drafter | None = None,
        *,
        prefix_reuse: bool = False,
        prefer_reuse: bool = False,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.model = model
        self.steps = compiled_steps(model)
        self.pool = SessionPool(lambda: pool, live=pool) if isinstance(pool, Session) else pool
        self.pool.live.check_model(model)
        self.drafter: Drafter = NoDrafter() if drafter is None else drafter
        self.prefer_reuse = prefer_reuse
        self.lock: AbstractContextManager[Any] = threading.RLock() if lock is None else lock
        self.block_policy: BlockPolicy | None = None
        self._traits = replace(
            Traits.of(model, self.pool.live.caches, self.drafter), reuse=prefix_reuse
        )
        self._vision: Mapping[int, Any] | None = None
        self._stepping = False
        self._equip()

    def __repr__(self) -> str:
        return f"Runner({type(self.model).__name__}, {self.session!r})"

    @property
    def session(self) -> Session:
        """The live conversation."""
        return self.pool.live

    @property
    def traits(self) -> Traits:
        """What its refusals depend on now."""
        return replace(
            self._traits,
            draft_off=self._traits.draft_off or self.session.draft_off,
            prompt_vision=self._vision is not None,
        )

    @property
    def steps_ahead(self) -> bool:
        """Whether a pass is better begun before the host has seen its token."""
        served = refusal("launch", self._traits) is None
        return served and isinstance(self.steps, CompiledModel)

    def begin_turn(self) -> None:
        """Announce a generation; one that was left between two of its tokens is ended.

        Raises:
            ProducerError: this is called from inside a step of it; nothing has moved.
        """
        self._check_idle()
        for session in (self.session, *self.pool.parked):
            session.settle()
        self.pool.begin_turn()

    @contextmanager
    def stepping(self) -> Generator[None]:
        """Around every step of a generation: what it calls may not drive this runner.

        Raises:
            ProducerError: a step is running already.
        """
        self._check_idle()
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def reset(self) -> None:
        """Drop the live conversation, or park it where the pool has places; start at position 0.

        Images that were set for the prompt stay set: a generation begins with this call.
        """
        self.pool.reset()
        self._equip()
        if self._vision is not None:
            self.session.taint(IMAGES)

    def try_reuse_prefix(self, prompt: Sequence[int]) -> Reuse:
        """Make the session live that can keep most of a prompt, and take it back to that."""
        self.pool.begin_turn()
        reason = refusal("try_reuse_prefix", self.traits)
        if reason is not None:
            return Reuse(0, reason)
        self.session.keep_checkpoint()
        decision = self.pool.select(prompt, prefer_reuse=self.prefer_reuse)
        if decision.tokens:
            self.session.take_back(decision)
        return Reuse(decision.tokens, decision.reason, self.pool.evicted)

    def session_slot_evicted(self) -> bool:
        """Whether a parked conversation was thrown out since the turn began."""
        return self.pool.evicted

    def set_prompt_vision(self, rows: Mapping[int, Any]) -> None:
        """Set what stands at prompt positions in place of token embeddings.

        It outlives `reset`, with which a generation begins; the caller clears it afterwards.
        """
        self._vision = rows
        self.session.taint(IMAGES)

    def clear_prompt_vision(self) -> None:
        """Forget the images of the last prompt; the session that took them stays distrusted."""
        self._vision = None

    def produce(self, token: int, position: int) -> mx.array:
        """Run one sampled token; return the logits [V] that follow it.

        Raises:
            ProducerError: `position` is not the cursor or a verify is open (nothing was fed), or
                the pass failed and the session is tainted.
        """
        logits = self._feed([token], position, Phase.DECODE, head=True)
        assert logits is not None
        return logits

    def produce_prefill(self, token: int, position: int) -> None:
        """Run one prompt token without the output head."""
        self._feed([token], position, Phase.PREFILL, head=False)

    def supports_chunked_prefill(self) -> bool:
        """Whether `prefill_chunk` serves this model."""
        return refusal("prefill_chunk", self._traits) is None

    def prefill_chunk(
        self, tokens: Sequence[int], start: int, is_final: bool = True
    ) -> mx.array | None:
        """Run prompt tokens in one pass; return the last one's logits [V] when `is_final`.

        Raises:
            ProducerError: there is no token, `start` is not the cursor, a verify is open or the
                model takes no chunks (nothing was fed), or the pass failed and the session is
                tainted.
        """
        self._refuse("prefill_chunk")
        session, split = self.session, len(tokens) - _LEAD
        keeps = session.recurrent and session.checkpoints.budget > 0
        if is_final and keeps and split > 0:
            self._feed(tokens[:split], start, Phase.PREFILL, head=False)
            session.keep_checkpoint(ends_prompt=True)
            tokens, start = tokens[split:], start + split
        logits = self._feed(tokens, start, Phase.PREFILL, head=is_final)
        if is_final:
            session.prompt_end = session.position
        if is_final and keeps and split <= 0:
            session.keep_checkpoint(ends_prompt=True)
        return logits

    def _check_idle(self) -> None:
        if self._stepping:
            raise ProducerError(
                f"{self!r} is in the midst of a step: what a generation calls cannot drive the "
                "same session; use a session of its own for a text inside another"
            )

    def _equip(self) -> None:
        """Give a session that was opened without the drafter a state of it."""
        session, drafter = self.session, self.drafter
        max_context = session.max_context  # not the session, which would hold itself
        if session.make_drafter_state is None:
            session.make_drafter_state = lambda: drafter.new_state(max_context)
            session.drafter_state = session.make_drafter_state()

    def _refuse(self, method: str) -> None:
        reason = refusal(method, self.traits)
        if reason is not None:
            raise ProducerError(f"{self!r} refuses {method}: {reason}")

    def _check_settled(self, what: str) -> None:
        if self.session.open_round is not None:
            raise ProducerError(
                f"{what} was called while the verify at {self.session.open_round.start} is open: "
                "call record_committed or rollback first"
            )

    def _check_start(self, tokens: Sequence[int], start: int) -> None:
        if not tokens:
            raise ProducerError("a pass needs at least one token")
        self._check_settled("a pass")
        if start != self.session.position:
            raise ProducerError(
                f"tokens for position {start} were given to {self!r}: the next position is "
                f"{self.session.position}"
            )

    def _feed(
        self, tokens: Sequence[int], start: int, phase: Phase, *, head: bool
    ) -> mx.array | None:
        self._check_start(tokens, start)
        output = self._pass(tokens, phase, "last" if head else "none")
        session = self.session
        commit(session, tokens, start, self.drafter, output)
        if session.checkpoints.due(session.position):
            session.keep_checkpoint()
        return last_row(output) if head else None

    def _pass(
        self, tokens: Sequence[int], phase: Phase, logits: LogitRows, *, record: bool = False
    ) -> ForwardOutput:
        model, session, drafter = self.steps, self.session, self.drafter
        return advance(model, session, tokens, drafter, phase=phase, logits=logits, record=record)

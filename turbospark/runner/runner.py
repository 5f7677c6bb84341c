"""The whole producer: a target that tries several tokens at once, and the drafter beside it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import mlx.core as mx

from turbospark.caches.rollback import checkpoint, restore, retain, rollback
from turbospark.errors import ProducerError, RewindError
from turbospark.protocols import Phase, RollbackPoint, Verified
from turbospark.runner.forward import commit, first_rows, launch, not_finite
from turbospark.runner.refusals import refusal
from turbospark.runner.target import TargetRunner
from turbospark.sessions.session import OpenRound


class Runner(TargetRunner):
    """Drives a model over the live session of a pool: the protocols the loops speak.

    A speculative round is `checkpoint`, drafts, `verify`, `rollback_retaining` where not every row
    stays, `rewind_drafter` to the round's beginning, `record_committed`.
    """

    def draft_off_reason(self) -> str | None:
        """Why this producer does not draft now; None where it does."""
        return refusal("draft", self.traits)

    def drafts_block_passes(self) -> bool:
        """Whether `draft_block` rather than `draft_step` serves the drafter."""
        return self.drafter.block_passes

    def prime_drafter(self, next_token: int, position: int) -> None:
        """Advance the drafter over the row `position`, the last one fed.

        Raises:
            ProducerError: nothing is drafted, or the position is another; nothing has moved.
        """
        self._refuse("prime_drafter")
        ids = self.session.fed_ids
        if position != len(ids) - 1:
            raise ProducerError(
                f"the drafter was to be primed at {position}: the last row is {len(ids) - 1}"
            )
        self.drafter.prime(self.session.drafter_state, ids, next_token)

    def draft_step(self, token: int, position: int) -> mx.array:
        """One draft step at the drafter's cursor: logits [V] of the token at position + 2.

        Raises:
            ProducerError: it is refused, or the position is not the cursor; nothing has moved.
        """
        self._refuse("draft_step")
        self._check_settled("draft_step")
        cursor = self.session.drafter_state.cursor
        if position != cursor:
            raise ProducerError(f"a draft step at {position}: the drafter's cursor is {cursor}")
        return self.drafter.step(self.session.drafter_state, token, position)

    def draft_block(self, anchor: int, base: int, block: int) -> list[int]:
        """Proposals for positions base + 1 to base + block; `anchor` is the token at `base`.

        Raises:
            ProducerError: it is refused, `base` is not the cursor, or the block is not 1 to
                `max_block`; nothing has moved.
        """
        self._refuse("draft_block")
        self._check_settled("draft_block")
        if base != self.session.position:
            raise ProducerError(f"a draft at {base}: the next position is {self.session.position}")
        if not 1 <= block <= self.drafter.max_block:
            raise ProducerError(
                f"a draft of {block} tokens: {self.drafter!r} gives 1 to {self.drafter.max_block}"
            )
        session = self.session
        return self.drafter.block(session.drafter_state, session.fed_ids, anchor, block)

    def rewind_drafter(self, position: int) -> None:
        """Take the drafter back to the end of the accepted tokens."""
        self._refuse("rewind_drafter")
        self.session.drafter_state.rewind(position)

    def verify(self, feed: Sequence[int], base: int) -> Verified:
        """Run tokens that do not count yet; row i of the logits predicts the token after feed[i].

        The round stays open until `record_committed`, a rollback or `reset`.

        Raises:
            ProducerError: it is refused (nothing was fed), or the pass failed: the session is
                tainted, and its caches are back where they were if they could go.
        """
        bound = self._traits.rewind_bound
        if bound is not None and len(feed) > bound:
            raise ProducerError(
                f"{self!r} cannot verify {len(feed)} tokens: its sliding windows can take back "
                f"{bound}; draft shorter blocks, or load with a larger ring_slack"
            )
        self._check_start(feed, base)
        session, point = self.session, self.checkpoint()
        try:
            output = self._pass(feed, Phase.DECODE, "all", record=True)
        except BaseException:
            restore(session.caches, point)
            raise
        assert output.logits is not None
        session.open_round = OpenRound(session.epoch, base)
        return Verified(output.logits, output, session.epoch)

    def launch(self, token: mx.array, base: int) -> Verified:
        """Begin the pass of one token that the host has not seen yet; nothing is waited for.

        It is an open round, which `record_committed` or `rollback` closes.

        Args:
            token: its id [1] int32.
            base: the cursor.

        Raises:
            ProducerError: `base` is another position, or a round is open; nothing was fed.
        """
        self._check_start([0], base)
        session = self.session
        output = launch(self.steps, session, token, self.drafter)
        session.open_round = OpenRound(session.epoch, base)
        assert output.logits is not None
        return Verified(output.logits, output, session.epoch)

    def refuse_row(self, position: int) -> NoReturn:
        """Taint the session for logits of `position`, the last one recorded.

        Raises:
            NonFiniteError: always; the first bad layer is named.
        """
        self.session.taint()
        ids = self.session.fed_ids.ids[: position + 1]
        raise not_finite(self.model, self.session, ids)

    def checkpoint(self) -> RollbackPoint:
        """Where the target stands: a position, and recurrent states by reference."""
        return checkpoint(self.session.caches)

    def supports_retaining_rollback(self) -> bool:
        """Whether `rollback_retaining` serves this model."""
        return refusal("rollback_retaining", self._traits) is None

    def rollback(self, point: RollbackPoint) -> None:
        """Take the target and its record back to a point; the drafter stays where it is.

        Raises:
            ProducerError: the caches cannot go there; nothing has moved.
        """
        try:
            rollback(self.session.caches, point)
        except RewindError as error:
            raise ProducerError(f"{self!r} cannot go back: {error}") from error
        self.session.moved_back(point)

    def rollback_retaining(self, point: RollbackPoint, keep: int, verified: Verified) -> None:
        """Keep the first `keep` rows of the open verify and take the rest back.

        Raises:
            ProducerError: the verify is not the open one, its rows were already cut, the point is
                another than its beginning, or keep is no row count of it; nothing has moved.
        """
        self._refuse("rollback_retaining")
        session = self.session
        opened = self._open_round(verified)
        if opened.cut or point.position != opened.start:
            raise ProducerError(
                f"rows from {opened.start} on were verified, and "
                + ("cut already" if opened.cut else f"the point is at {point.position}")
            )
        try:
            retain(session.caches, point, keep, verified.output.row_inputs)
        except RewindError as error:
            raise ProducerError(f"{self!r} cannot keep {keep} rows: {error}") from error
        session.epoch += 1
        session.open_round = replace(opened, cut=True)

    def record_committed(self, tokens: Sequence[int], start: int, verified: Verified) -> None:
        """Note which rows of the open verify survived; the drafter follows over them.

        Raises:
            ProducerError: the verify is not the open one, or the caches hold other rows than
                these (nothing has moved), or the drafter failed and the session is tainted.
        """
        session, opened = self.session, self._open_round(verified)
        if start != opened.start or start + len(tokens) != session.position or not tokens:
            raise ProducerError(
                f"{len(tokens)} tokens from {start} on were to be recorded, but the rows verified "
                f"are {opened.start} to {session.position - 1}"
            )
        commit(session, tokens, start, self.drafter, first_rows(verified.output, len(tokens)))
        if session.checkpoints.due(session.position):
            session.keep_checkpoint()

    def _open_round(self, verified: Verified) -> OpenRound:
        opened = self.session.open_round
        if opened is None or opened.epoch != verified.epoch:
            raise ProducerError(
                f"{self!r} has moved since this verify, so its rows are no more those of the caches"
            )
        return opened

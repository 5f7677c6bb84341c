"""One speculative round: propose, verify in one pass, keep what the rule keeps, settle.

Between two rounds producer and sink agree as between two plain steps: what was fed is the sink's
history but for its last token.
"""

from array import array
from collections.abc import Generator, Sequence

from turbospark.errors import NonFiniteError, ProducerError
from turbospark.protocols import RollbackPoint, SpeculativeProducer, Verified
from turbospark.runner.sink import Committed, TokenSink
from turbospark.runner.token_step import Step, Stopwatch
from turbospark.sampling.select import Choice, Chooser
from turbospark.speculation.accept import Proposal, choose_acceptance
from turbospark.speculation.adaptive import BlockPolicy
from turbospark.speculation.statistics import DraftStatistics


def round_block(wish: int, *, remaining: int, room: int) -> int:
    """How many tokens a round may propose.

    Args:
        wish: how many would be worth it.
        remaining: tokens that may still be generated; a pass gives one more than it keeps.
        room: rows left in the context once the token before the proposals is fed.
    """
    return max(0, min(wish, remaining - 1, room))


class Drafting:
    """The drafting of one generation.

    Args:
        producer: whose drafter is open.
        chooser: the generation's.
        policy: how many proposals are wanted.
        max_context: rows the producer holds at most.
        vocab_size: bounds the ids that may be proposed.

    Attributes:
        statistics: what came of it so far.
    """

    def __init__(
        self,
        producer: SpeculativeProducer,
        chooser: Chooser,
        policy: BlockPolicy,
        *,
        max_context: int,
        vocab_size: int,
    ) -> None:
        self.policy = policy
        self.statistics = DraftStatistics()
        self._producer = producer
        self._chooser = chooser
        self._block_passes = producer.drafts_block_passes()
        self._acceptance = choose_acceptance(chooser, block_passes=self._block_passes)
        self._max_context = max_context
        self._vocab_size = vocab_size
        policy.begin()

    @property
    def off_reason(self) -> str | None:
        """Why nothing is proposed now, or was so far; None where something is."""
        if self.policy.off_reason is not None or self.statistics.drafted:
            return self.policy.off_reason
        return "no token has been proposed yet"

    def propose(self, anchor: int, sink: TokenSink) -> list[Proposal]:
        """Proposals for the tokens after `anchor`; none where a plain step is due.

        Args:
            anchor: the last token of the sink's history, which is yet to be fed.
            sink: read only.

        Raises:
            ProducerError: the drafter failed, or proposed what it must not.
        """
        room = self._max_context - len(sink.history)
        count = round_block(self.policy.choose(), remaining=sink.remaining, room=room)
        if count == 0:
            return []
        base = len(sink.history) - 1
        if not self._block_passes:
            return self._propose_stepwise(anchor, base, count, sink)
        tokens = self._producer.draft_block(anchor, base, count)
        if len(tokens) > count:
            raise ProducerError(f"the drafter proposed {len(tokens)} tokens where {count} may be")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ProducerError(
                    f"the drafter proposed token {token}; ids run from 0 to {self._vocab_size - 1}"
                )
        return [Proposal(token) for token in tokens]

    def _propose_stepwise(
        self, anchor: int, base: int, count: int, sink: TokenSink
    ) -> list[Proposal]:
        producer, imagined = self._producer, array("i", sink.history)
        proposals: list[Proposal] = []
        stepped, token = 0, anchor
        try:
            for _ in range(count):
                logits = producer.draft_step(token, base - 1 + stepped)
                stepped += 1
                if logits.shape != (self._vocab_size,):
                    raise ProducerError(
                        f"the drafter gave logits of shape {logits.shape}, not "
                        f"({self._vocab_size},) as the target does"
                    )
                proposal = self._acceptance.propose(logits, imagined, sink.prompt_tokens)
                proposals.append(proposal)
                token = proposal.token
                imagined.append(token)
        except BaseException as error:
            if stepped:
                producer.rewind_drafter(base)
            if isinstance(error, NonFiniteError):
                raise NonFiniteError(f"the drafter failed: {error}") from error
            raise
        return proposals

    def round(
        self,
        anchor: int,
        proposals: Sequence[Proposal],
        sink: TokenSink,
        watch: Stopwatch,
        began: float,
    ) -> Generator[Step, None, Choice | None]:
        """Verify proposals and give those that stay, one by one.

        Closed or broken off at any of them, the producer has been fed the sink's history but for
        the token given last.

        Args:
            anchor: the last token of the sink's history, which is yet to be fed.
            proposals: at least one.
            sink: takes the tokens that stay.
            watch: running; stands still while a token is given.
            began: what it showed before anything was proposed.

        Returns:
            the choice that follows, not committed yet; None where the generation has ended.
        """
        producer = self._producer
        base = len(sink.history) - 1
        feed = [anchor, *(proposal.token for proposal in proposals)]
        point = producer.checkpoint()
        verified = producer.verify(feed, base)
        self.statistics = self.statistics.after_draft(len(proposals))
        keep, following = 1, None
        last: tuple[Committed, Choice] | None = None
        try:
            for place, proposal in enumerate(proposals):
                verdict = self._acceptance.judge(
                    verified.logits[place], proposal, sink.history, sink.prompt_tokens
                )
                if not verdict.kept:
                    following = verdict.choice
                    break
                self.statistics = self.statistics.after_accept(place)
                committed = sink.commit(proposal.token)
                if committed.reason is not None:
                    last = committed, verdict.choice
                    break
                yield self._step(committed, verdict.choice, watch)
                watch.resume()
                keep += 1  # not before the caller has come back for more
            else:
                following = self._chooser.choose(
                    verified.logits[len(proposals)], sink.history, sink.prompt_tokens
                )
        finally:
            self._settle(feed, base, point, verified, keep)
        if last is not None:
            yield self._step(*last, watch)
            return None
        self.policy.note_round(len(proposals), keep - 1, watch.spent - began)
        return following

    def _step(self, committed: Committed, choice: Choice, watch: Stopwatch) -> Step:
        return Step(committed, choice, watch.pause(), from_draft=True, drafts=self.statistics)

    def _settle(
        self, feed: list[int], base: int, point: RollbackPoint, verified: Verified, keep: int
    ) -> None:
        """Keep the first `keep` rows, tell the record, and let the drafter follow over them."""
        producer = self._producer
        if keep < len(feed):
            self.statistics = self.statistics.after_rollback()
            producer.rollback_retaining(point, keep, verified)
        # Its own rows over proposals go: it follows over those that stayed with true inputs.
        producer.rewind_drafter(base)
        producer.record_committed(feed[:keep], base, verified)

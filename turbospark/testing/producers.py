"""Producers that follow a script and police their own cursors, without a runner behind them."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark.protocols import ForwardOutput, Reuse, RollbackPoint, Verified
from turbospark.testing.drafters import Quality, spoil
from turbospark.testing.models import LogitsOf


class ScriptedProducer:
    """A producer without chunks that polices its own cursor.

    Args:
        logits_of: the logits after a text.
        overclaim: `try_reuse_prefix` then claims this many tokens, whatever the prompt.

    Attributes:
        fed: every id that was taken and not taken back.
        calls: the name of every call that moved something.
        furthest: the most ids it ever held; a context must bound it.
    """

    def __init__(self, logits_of: LogitsOf, overclaim: int = 0) -> None:
        self.fed: list[int] = []
        self.calls: list[str] = []
        self.furthest = 0
        self._logits_of = logits_of
        self._overclaim = overclaim

    def reset(self) -> None:
        """Start at position 0."""
        self.calls.append("reset")
        self.fed = []

    def try_reuse_prefix(self, prompt: Sequence[int]) -> Reuse:
        """Claim what was scripted; the ids behind it are the prompt's own."""
        claimed = min(self._overclaim, len(prompt) - 1)
        self.fed = list(prompt[:claimed])
        return Reuse(self._overclaim, "scripted")

    def session_slot_evicted(self) -> bool:
        """There are no slots."""
        return False

    def produce_prefill(self, token: int, position: int) -> None:
        """Take one prompt token."""
        self._take("produce_prefill", [token], position)

    def produce(self, token: int, position: int) -> mx.array:
        """Take one token and look the logits up."""
        self._take("produce", [token], position)
        return self._row(self.fed)

    def _take(self, call: str, tokens: Sequence[int], position: int) -> None:
        if position != len(self.fed):
            raise AssertionError(f"{call} at {position}, cursor at {len(self.fed)}")
        self.calls.append(call)
        self.fed.extend(tokens)
        self.furthest = max(self.furthest, len(self.fed))

    def _row(self, ids: Sequence[int]) -> mx.array:
        return mx.array(self._logits_of(ids).astype(np.float32))


class ScriptedSpeculator(ScriptedProducer):
    """A producer that verifies and drafts, and polices both of its cursors.

    Args:
        logits_of: the target's script.
        quality: how good the drafter is, see `turbospark.testing.drafters`.
        block_passes: whether whole blocks are drafted rather than steps.
        max_block: proposals of a round at most.

    Attributes:
        recorded: the ids that count: `fed`, less what an open round has not committed yet.
        drafter_cursor: the position of the drafter's next row; it never passes `recorded` between
            two rounds.
        drafter_furthest: the most rows the drafter ever held.
    """

    def __init__(
        self,
        logits_of: LogitsOf,
        quality: Quality = "perfect",
        *,
        block_passes: bool = False,
        max_block: int = 8,
    ) -> None:
        super().__init__(logits_of)
        self.quality: Quality = quality
        self.max_block = max_block
        self.recorded: list[int] = []
        self.drafter_cursor = 0
        self.drafter_furthest = 0
        self._block_passes = block_passes
        self._chain: list[int] = []
        self._epoch = 0
        self._open: Verified | None = None

    def reset(self) -> None:
        """Start at position 0, the drafter too."""
        super().reset()
        self.recorded, self._open, self._chain = [], None, []
        self.drafter_cursor = 0

    def produce_prefill(self, token: int, position: int) -> None:
        """Take one prompt token."""
        self._check_settled("produce_prefill")
        super().produce_prefill(token, position)
        self._follow()

    def produce(self, token: int, position: int) -> mx.array:
        """Take one token and look the logits up."""
        self._check_settled("produce")
        logits = super().produce(token, position)
        self._follow()
        return logits

    def supports_chunked_prefill(self) -> bool:
        """It takes chunks."""
        return True

    def prefill_chunk(
        self, tokens: Sequence[int], start: int, is_final: bool = True
    ) -> mx.array | None:
        """Take prompt tokens."""
        self._check_settled("prefill_chunk")
        self._take("prefill_chunk", tokens, start)
        self._follow()
        return self._row(self.fed) if is_final else None

    def draft_off_reason(self) -> str | None:
        """It always drafts."""
        return None

    def drafts_block_passes(self) -> bool:
        """As it was told."""
        return self._block_passes

    def prime_drafter(self, next_token: int, position: int) -> None:
        """Write the row `position`, the last one fed."""
        if position != len(self.recorded) - 1 or position != self.drafter_cursor:
            raise AssertionError(f"primed at {position}, cursor at {self.drafter_cursor}")
        self._chain = [next_token]
        self._move_drafter(position + 1)

    def draft_step(self, token: int, position: int) -> mx.array:
        """One draft step; the first of a round stands on the last token fed."""
        self._check_settled("draft_step")
        if position != self.drafter_cursor:
            raise AssertionError(f"a draft step at {position}, cursor at {self.drafter_cursor}")
        self.calls.append("draft_step")
        self._chain.append(token)
        text = [*self.recorded, *self._chain]
        if len(text) != position + 2:
            raise AssertionError(f"a draft step at {position} over a text of {len(text)} tokens")
        self._move_drafter(position + 1)
        logits = spoil(self._logits_of(text), position + 2, self.quality)
        return mx.array(logits.astype(np.float32))

    def draft_block(self, anchor: int, base: int, block: int) -> list[int]:
        """Exactly `block` proposals."""
        self._check_settled("draft_block")
        if base != len(self.recorded) or not 1 <= block <= self.max_block:
            raise AssertionError(f"a block of {block} at {base}, {len(self.recorded)} recorded")
        self.calls.append("draft_block")
        text, proposals = [*self.recorded, anchor], list[int]()
        for _ in range(block):
            logits = self._logits_of(text)
            proposals.append(int(np.argmax(spoil(logits, len(text), self.quality))))
            text.append(int(np.argmax(logits)))
        return proposals

    def rewind_drafter(self, position: int) -> None:
        """Take the drafter back."""
        if position > max(self.drafter_cursor, len(self.recorded)):
            raise AssertionError(f"rewind to {position}, cursor at {self.drafter_cursor}")
        self._chain = []
        self.drafter_cursor = min(self.drafter_cursor, position)

    def checkpoint(self) -> RollbackPoint:
        """Where the target stands."""
        return RollbackPoint(len(self.fed))

    def verify(self, feed: Sequence[int], base: int) -> Verified:
        """Take tokens that do not count yet."""
        self._check_settled("verify")
        self._take("verify", feed, base)
        ends = range(base + 1, len(self.fed) + 1)
        logits = mx.stack([self._row(self.fed[:end]) for end in ends])
        self._epoch += 1
        self._open = Verified(logits, ForwardOutput(logits), self._epoch)
        return self._open

    def rollback(self, point: RollbackPoint) -> None:
        """Take the target back to a point."""
        if point.position > len(self.fed):
            raise AssertionError(f"rollback to {point.position}, cursor at {len(self.fed)}")
        self.calls.append("rollback")
        del self.fed[point.position :]
        del self.recorded[point.position :]
        self._open = None

    def rollback_retaining(self, point: RollbackPoint, keep: int, verified: Verified) -> None:
        """Keep the first rows of the open verify."""
        rows = len(self.fed) - point.position
        if verified is not self._open or point.position != len(self.recorded):
            raise AssertionError("this verify is not the open one")
        if not 1 <= keep <= rows:
            raise AssertionError(f"keep={keep} of {rows} rows")
        self.calls.append("rollback_retaining")
        del self.fed[point.position + keep :]

    def record_committed(self, tokens: Sequence[int], start: int, verified: Verified) -> None:
        """Close the open round; the drafter must have been taken back to its start."""
        if verified is not self._open or start != len(self.recorded):
            raise AssertionError("this verify is not the open one")
        if self.fed[start:] != list(tokens):
            raise AssertionError(f"{list(tokens)} recorded where {self.fed[start:]} stand")
        if self.drafter_cursor > start:
            raise AssertionError(f"the drafter at {self.drafter_cursor} holds rows of a draft")
        self.calls.append("record_committed")
        self._open = None
        self._follow()

    def _follow(self) -> None:
        self.recorded, self._chain = list(self.fed), []
        written = len(self.recorded) - (0 if self._block_passes else 1)
        self._move_drafter(max(written, 0))

    def _move_drafter(self, position: int) -> None:
        self.drafter_cursor = position
        self.drafter_furthest = max(self.drafter_furthest, position)

    def _check_settled(self, call: str) -> None:
        if self._open is not None:
            raise AssertionError(f"{call} while a verify is open")

"""What the generation loops drive: producers of logits, and the values of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import mlx.core as mx

from turbospark.protocols.models import ForwardOutput


@dataclass(frozen=True, slots=True)
class Reuse:
    """What `try_reuse_prefix` decided: `tokens` already covered, and why not more."""

    tokens: int
    reason: str
    evicted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RollbackPoint:
    """Where a session stood before a verify: a position, and recurrent state by reference.

    Attributes:
        position: tokens fed.
        recurrent: by cache index, the state arrays of every recurrent cache.
    """

    position: int
    recurrent: Mapping[int, tuple[mx.array, ...]] = field(
        default_factory=dict[int, tuple[mx.array, ...]]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a verify returns and one rollback consumes.

    Attributes:
        logits: [M, V] evaluated; row i predicts the token after the i-th fed one.
        output: the whole pass: hidden rows and taps for the drafter, row inputs for a rollback.
        epoch: the session's count of passes and moves; a rollback under another one is refused.
    """

    logits: mx.array
    output: ForwardOutput
    epoch: int


class LogitProducer(Protocol):
    """Token in, logits out: what the generation loops drive."""

    def reset(self) -> None:
        """Drop the live conversation and start at position 0."""
        ...

    def produce(self, token: int, position: int) -> mx.array:
        """Run one token at `position`, which must be the cursor; return [V] evaluated logits."""
        ...

    def produce_prefill(self, token: int, position: int) -> None:
        """Run one prompt token whose logits nobody wants; the cursor moves all the same."""
        ...

    def try_reuse_prefix(self, prompt: Sequence[int]) -> Reuse:
        """Continue from the state that covers the prompt's first `Reuse.tokens` ids."""
        ...

    def session_slot_evicted(self) -> bool:
        """Whether this turn threw a parked conversation out; asked after `reset`."""
        ...


@runtime_checkable
class ChunkedPrefillRunner(LogitProducer, Protocol):
    """A producer that also takes many prompt tokens in one pass."""

    def supports_chunked_prefill(self) -> bool:
        """Whether `prefill_chunk` serves this model; it raises where this says no."""
        ...

    def prefill_chunk(
        self, tokens: Sequence[int], start: int, is_final: bool = True
    ) -> mx.array | None:
        """Feed tokens at `start`; return the last row's logits when `is_final`, else None."""
        ...


@runtime_checkable
class SpeculativeProducer(ChunkedPrefillRunner, Protocol):
    """A producer that can try several tokens at once and take some of them back."""

    def draft_off_reason(self) -> str | None:
        """Why this producer does not draft now; None where it does."""
        ...

    def drafts_block_passes(self) -> bool:
        """Whether `draft_block` rather than `draft_step` serves the drafter."""
        ...

    def prime_drafter(self, next_token: int, position: int) -> None:
        """Advance the drafter over the row `position`, whose following token is now known."""
        ...

    def draft_step(self, token: int, position: int) -> mx.array:
        """One draft step at the drafter's cursor: logits [V] of the token at position + 2."""
        ...

    def draft_block(self, anchor: int, base: int, block: int) -> list[int]:
        """Proposals for positions base + 1 to base + block; `anchor` is the token at `base`."""
        ...

    def rewind_drafter(self, position: int) -> None:
        """Take the drafter back to the end of the accepted tokens."""
        ...

    def checkpoint(self) -> RollbackPoint:
        """Where the target stands, before the pass that may be taken back."""
        ...

    def verify(self, feed: Sequence[int], base: int) -> Verified:
        """Feed tokens at `base`, the cursor; nothing is recorded before `record_committed`."""
        ...

    def rollback(self, point: RollbackPoint) -> None:
        """Take the target back to a point; the drafter stays where it is."""
        ...

    def rollback_retaining(self, point: RollbackPoint, keep: int, verified: Verified) -> None:
        """Keep the first `keep` rows of a verify and take the rest back.

        Raises:
            ProducerError: `verified` is of another pass, or keep is no row count of it.
        """
        ...

    def record_committed(self, tokens: Sequence[int], start: int, verified: Verified) -> None:
        """Note which rows of a verify survived; the drafter follows over them."""
        ...

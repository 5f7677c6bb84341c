"""What the rooms promise each other: protocols with several implementations, and plain values."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import mlx.core as mx


class Phase(enum.Enum):
    """What a forward pass is for; kernels are chosen by it, never by the number of rows.

    Within one phase M rows equal M passes of one row, bit for bit, on a CPU.
    """

    PREFILL = "prefill"  # rows of a prompt, its last one included
    DECODE = "decode"  # one sampled token, or the rows of a verify


LogitRows = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """What one forward pass returns.

    Attributes:
        logits: [R, V] float32, unnormalised; R = T for "all", 1 for "last"; None for "none".
        taps: the residual stream [T, C] after each layer that was asked for, by layer index.
        hidden: the final norm's output [T, C] where it was asked for.
        row_inputs: by cache index, what `record=True` noted for every recurrent cache.
    """

    logits: mx.array | None
    taps: Mapping[int, mx.array] = field(default_factory=dict[int, mx.array])
    hidden: mx.array | None = None
    row_inputs: "Mapping[int, RowInputs]" = field(default_factory=dict[int, "RowInputs"])


class RowInputs(Protocol):
    """What a pass of M rows fed to one recurrent layer: enough to stop after fewer rows."""

    @property
    def rows(self) -> int:
        """M."""
        ...

    def replay(self, keep: int) -> tuple[mx.array, ...]:
        """The layer's state after the first `keep` rows, 1 <= keep <= M.

        Bit for bit what a pass of `keep` rows alone would have left, on a CPU.
        """
        ...

    def arrays(self) -> tuple[mx.array, ...]:
        """Everything it holds, for a step that is compiled."""
        ...

    def like(self, arrays: Sequence[mx.array]) -> "RowInputs":
        """The same kind of row inputs over other arrays, in the order of `arrays`."""
        ...


class LayerCache(Protocol):
    """One layer's memory of the tokens fed so far.

    An implementation says `recurrent`: whether it folds all tokens into one state, which `place`
    puts back, or holds rows. One of rows has a `rewind_bound`: the tokens of every pass that can be
    taken back, or None for any number.
    """

    @property
    def offset(self) -> int:
        """Tokens written so far; also the position of the next one."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        ...

    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back."""
        ...

    def rewind(self, count: int) -> None:
        """Take back exactly `count` tokens, or raise RewindError and move nothing."""
        ...

    def fork(self) -> Any:
        """An independent cache with the same content; sealed rows are shared."""
        ...

    def export(self) -> dict[str, mx.array]:
        """The content as arrays, for a file; `restore` of a cache just made takes them."""
        ...

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave.

        Raises:
            CheckpointError: arrays are missing, left over, or of another shape or dtype; nothing
                has changed.
        """
        ...


class CausalModel(Protocol):
    """A family's model: arithmetic only. It keeps nothing between calls.

    `vocab_size` bounds the token ids it takes; `max_position` is the trained length, if any.
    A model that cannot do it all says so: `takes_chunks = False` where a prompt goes in token by
    token, `records_rows = False` where its recurrent layers cannot be cut short after a pass.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position(self) -> int | None: ...

    @property
    def num_layers(self) -> int: ...

    def make_caches(self, max_context: int, slack: int) -> list[Any]:
        """Empty caches for one session, as many as `__call__` wants.

        Args:
            max_context: tokens the session may hold.
            slack: rows a ring keeps beyond its window.
        """
        ...

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Rename and regroup checkpoint tensors to this model's parameter paths; idempotent.

        Values are `mx.array` or `QuantizedWeight`, keyed by paths that end in `.weight`, `.bias`
        or a bare parameter name; a quantized matrix is ONE value under its `.weight` name.
        """
        ...

    def __call__(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        *,
        phase: Phase,
        logits: LogitRows = "last",
        taps: Sequence[int] = (),
        hidden: bool = False,
        record: bool = False,
    ) -> ForwardOutput:
        """Feed tokens at the caches' offset; the caches advance by T.

        Args:
            tokens: [T] int32, T >= 1.
            caches: as `make_caches` gave them; advanced in place.
            phase: prefill or decode.
            logits: which rows go through the output head.
            taps: layer indices whose residual stream is returned.
            hidden: whether the final norm's output of every row is returned.
            record: whether recurrent layers note their row inputs, so that the pass can be cut
                short afterwards.
        """
        ...


@dataclass(frozen=True, slots=True)
class GGUFMapping:
    """How a GGUF architecture becomes a family's config.json and parameter names.

    Attributes:
        config: GGUF metadata (keys as in the file) to the fields the family reads.
        names: GGUF tensor stem to parameter path without `.weight`/`.bias`; `{i}` is the layer.
        interleaved_rope: parameter suffixes whose rows llama.cpp stores in interleaved RoPE
            order and that must be put back to half-split order (`q_proj`, `k_proj`).
        norm_offset: added to every `*norm` vector by the converter; taken off again on loading.
    """

    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Mapping[str, str]
    interleaved_rope: tuple[str, ...] = ()
    norm_offset: float = 0.0


DrafterBuilder = Callable[[Mapping[str, Any], Any], Any]
"""(configuration, the model drafted for) -> a drafter's module, or None."""


@dataclass(frozen=True, slots=True)
class Family:
    """What an entry point of the group `turbospark.families` gives.

    Attributes:
        name: the family's name in messages.
        build: config.json (normalised, text part) to a model with unset weights; refuses by name
            what the family does not implement.
        gguf: GGUF architecture (`general.architecture`) to its mapping.
        drafters: "mtp" or "dflash" to what builds the drafter's module, with unset weights, from
            a configuration and the model it drafts for. "mtp" is given the model's own
            configuration and answers None where that announces no head; "dflash" is given the
            drafter checkpoint's. The module's `sanitize` names tensors as a model's does; table
            and output head are the model's own.
    """

    name: str
    build: Callable[[Mapping[str, Any]], CausalModel]
    gguf: Mapping[str, GGUFMapping] = field(default_factory=dict[str, GGUFMapping])
    drafters: Mapping[str, DrafterBuilder] = field(default_factory=dict[str, DrafterBuilder])


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


class DrafterState(Protocol):
    """What a drafter remembers of one conversation: it belongs to the session.

    `cursor` is the position of the next row it writes. What it has captured of rows that were fed
    but not written yet counts as covered.
    """

    @property
    def cursor(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def fork(self) -> Any:
        """An independent state with the same content."""
        ...

    def mark(self) -> Any:
        """What a rewind to this very position needs beside the written rows, by reference."""
        ...

    def resume_at(self, keep: int, mark: Any = None) -> int:
        """The last position <= keep from which it can follow; 0 where it has a hole.

        Args:
            keep: how many fed tokens the target can keep; the one after them may be another.
            mark: what `mark` gave at that position, if it was called there.
        """
        ...

    def rewind(self, position: int, mark: Any = None) -> None:
        """Stand where the target stands: at a position that `resume_at` gave."""
        ...

    def export(self) -> dict[str, mx.array]:
        """The content as arrays, for a file."""
        ...

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave; raises CheckpointError and changes nothing otherwise."""
        ...


class Drafter(Protocol):
    """Proposes tokens that the target then verifies. It keeps nothing between calls.

    Attributes of an implementation: `name` ("off", "ngram", "mtp", "dflash", "model");
    `block_passes`, whether `block` serves it rather than `step`; `max_block`, the most proposals
    of a round; `hidden` and `taps`, what it needs of every forward pass of the target. One that
    needs `hidden` needs the final norm of headless prefill too.
    """

    @property
    def name(self) -> str: ...

    @property
    def block_passes(self) -> bool: ...

    @property
    def max_block(self) -> int: ...

    @property
    def hidden(self) -> bool: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def new_state(self, max_context: int) -> Any:
        """The `DrafterState` of an empty conversation."""
        ...

    def observe(self, state: Any, ids: Sequence[int], start: int, output: ForwardOutput) -> None:
        """Follow the target over rows that are final.

        Args:
            state: advanced: rows whose following token is known are written, the rest captured.
            ids: every fed id, these rows' own included.
            start: position of the output's first row.
            output: hidden rows and taps, cut to ids[start:].
        """
        ...

    def prime(self, state: Any, ids: Sequence[int], anchor: int) -> None:
        """Bring `state` up to all of `ids`, whose following token `anchor` is now known."""
        ...

    def step(self, state: Any, token: int, position: int) -> mx.array:
        """One draft step: logits [V] of the token at `position` + 2.

        Args:
            state: advanced by the row `position`.
            token: the token at `position` + 1.
            position: the state's cursor, or ProducerError.
        """
        ...

    def block(self, state: Any, ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """At most `count` proposals for the tokens after `anchor`, which follows `ids`.

        Exactly `count` from a drafter that always has an opinion; n-gram lookup may give fewer
        or none.
        """
        ...


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

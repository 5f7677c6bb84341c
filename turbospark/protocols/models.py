"""What a family gives: a model's forward call, its caches, and the plain values they pass."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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
        hidden: the final norm's output [T, C] where it was asked for; the residual stream itself
            in a family without a final norm.
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
    token, `records_rows = False` where its recurrent layers cannot be cut short after a pass. One
    with tables in files gives what a pass needs of them by `look_up(tokens, caches)`, and takes it
    as `found`: a compiled step cannot read files.
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

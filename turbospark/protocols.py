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
    """

    logits: mx.array | None
    taps: Mapping[int, mx.array] = field(default_factory=dict[int, mx.array])


class LayerCache(Protocol):
    """One layer's memory of the tokens fed so far."""

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


class CausalModel(Protocol):
    """A family's model: arithmetic only. It keeps nothing between calls.

    `vocab_size` bounds the token ids it takes; `max_position` is the trained length, if any.
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
    ) -> ForwardOutput:
        """Feed tokens at the caches' offset; the caches advance by T.

        Args:
            tokens: [T] int32, T >= 1.
            caches: as `make_caches` gave them; advanced in place.
            phase: prefill or decode.
            logits: which rows go through the output head.
            taps: layer indices whose residual stream is returned.
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


@dataclass(frozen=True, slots=True)
class Family:
    """What an entry point of the group `turbospark.families` gives.

    Attributes:
        name: the family's name in messages.
        build: config.json (normalised, text part) to a model with unset weights; refuses by name
            what the family does not implement.
        gguf: GGUF architecture (`general.architecture`) to its mapping.
    """

    name: str
    build: Callable[[Mapping[str, Any]], CausalModel]
    gguf: Mapping[str, GGUFMapping] = field(default_factory=dict[str, GGUFMapping])


@dataclass(frozen=True, slots=True)
class Reuse:
    """What `try_reuse_prefix` decided: `tokens` already covered, and why not more."""

    tokens: int
    reason: str
    evicted: bool = False


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

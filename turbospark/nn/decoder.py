"""What the models of all families are around their layers: table, final norm, head, taps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import OptionError
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.target import HeadGeometry, Transform
from turbospark.nn.linear import Embedding, Linear, RMSNorm
from turbospark.nn.projections import OutputHead, TokenEmbedding
from turbospark.protocols import ForwardOutput, LogitRows, Phase, RowInputs

Cache = KVCache | RingCache
Layer = Callable[[mx.array, Cache, Phase], mx.array]
"""h [T, C], cache, phase -> h [T, C]."""


class Sizes(Protocol):
    """What a family's configuration says of its model's outline."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def tie_word_embeddings(self) -> bool: ...


class Decoder(nn.Module):
    """Table, layers and final norm, if there is one: what checkpoints call `model`."""

    def __init__(self, config: Sizes, layers: Sequence[nn.Module], norm: RMSNorm | None) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = list(layers)
        self.norm = norm


class CausalLM(nn.Module):
    """A decoder and its output head, which is the table itself where the two are tied.

    A family adds `make_caches` and `sanitize`, and its own `__call__` where its layers need more
    than the stream.
    """

    def __init__(
        self,
        config: Sizes,
        decoder: Decoder,
        embed: TokenEmbedding,
        *,
        softcap: float | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self._sizes = config
        self.model = decoder
        self.embed = embed
        matrix: Embedding | Linear = decoder.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = matrix = Linear(config.hidden_size, config.vocab_size)
        self.head: Transform = OutputHead(decoder.norm, matrix, softcap=softcap, factor=factor)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._sizes.vocab_size

    @property
    def max_position(self) -> int:
        """The trained length in tokens."""
        return self._sizes.max_position_embeddings

    @property
    def num_layers(self) -> int:
        """Layers that `taps` may name."""
        return self._sizes.num_hidden_layers

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
        """Feed tokens [T] at the caches' offset; the caches advance by T.

        No layer of this kind is recurrent, so there are no row inputs to record.

        Raises:
            OptionError: a tap names no layer; no cache has moved.
        """
        self.check_taps(taps)
        h, kept = self.embed(tokens), dict[int, mx.array]()  # [T, C]
        layers = cast("list[Layer]", self.model.layers)
        for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            h = layer(h, cache, phase)
            if i in taps:
                kept[i] = h
        return self.finish(h, logits, phase, kept, hidden=hidden)

    def check_taps(self, taps: Sequence[int]) -> None:
        """Refuse taps that name no layer.

        Raises:
            OptionError: one is negative or too large.
        """
        for tap in taps:
            if not 0 <= tap < self.num_layers:
                raise OptionError(
                    f"tap {tap} names no layer: the model has 0 to {self.num_layers - 1}"
                )

    def finish(
        self,
        h: mx.array,
        rows: LogitRows,
        phase: Phase,
        taps: Mapping[int, mx.array],
        *,
        hidden: bool = False,
        row_inputs: Mapping[int, RowInputs] | None = None,
    ) -> ForwardOutput:
        """Apply the output head to the rows of h [T, C] that are wanted.

        Args:
            h: the stream after the last layer.
            rows: whose logits are wanted.
            phase: prefill or decode.
            taps: the stream after the layers asked for.
            hidden: whether the final norm of every row is wanted, or h where there is none.
            row_inputs: what recurrent layers noted.
        """
        norm = self.model.norm
        normed = rms_norm_reference(h, None if norm is None else norm.value) if hidden else None
        wanted = h[-1:] if rows == "last" and h.shape[0] > 1 else h
        logits = None if rows == "none" else self.head(wanted, phase)
        return ForwardOutput(logits, taps, normed, row_inputs or {})


def layer_caches(
    layers: Iterable[tuple[HeadGeometry, int | None]], max_context: int, slack: int
) -> list[Cache]:
    """Empty caches for layers of given heads: a ring where a layer has a window."""
    return [
        KVCache(heads.num_kv_heads, heads.head_dim, max_context)
        if window is None
        else RingCache(heads.num_kv_heads, heads.head_dim, max_context, window, slack)
        for heads, window in layers
    ]

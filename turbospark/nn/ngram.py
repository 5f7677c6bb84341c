"""Embeddings of hashed n-grams, injected into every residual stream of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import ShapeError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.delta_net import next_tail
from turbospark.kernels.ngram import next_context
from turbospark.kernels.streams import grouped_norm_reference
from turbospark.kernels.target import KernelSet
from turbospark.nn.delta_net import Filter
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.ngram_table import NgramEmbedding
from turbospark.nn.projections import NormedProjections
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase, RowInputs

State = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NgramRows:
    """What T rows did to the state of an n-gram layer.

    Attributes:
        state: before the rows.
        normed: [T, G * C], what the filter saw.
        tokens: [T] int32.
    """

    state: State
    normed: mx.array
    tokens: mx.array

    @property
    def rows(self) -> int:
        """T."""
        return self.tokens.shape[0]

    def arrays(self) -> tuple[mx.array, ...]:
        """Everything it holds."""
        return (*self.state, self.normed, self.tokens)

    def like(self, arrays: Sequence[mx.array]) -> "NgramRows":
        """Row inputs over other arrays, in the order of `arrays`."""
        tail, before, normed, tokens = arrays
        return NgramRows((tail, before), normed, tokens)

    def replay(self, keep: int) -> State:
        """The state after the first `keep` rows, 1 <= keep <= T.

        Raises:
            ShapeError: there are not so many rows.
        """
        if not 1 <= keep <= self.rows:
            raise ShapeError(f"{keep} rows cannot be kept of {self.rows} that were recorded")
        tail, before = self.state
        return next_tail(self.normed[:keep], tail), next_context(self.tokens[:keep], before)


class NgramGate(Unit):
    """A value for every stream, as open as its key fits the stream; then a filter over rows.

    Args:
        norms: of keys, streams and gated values, each stream by itself.
        conv: the filter, whose taps are `dilation` rows apart.
        dilation: see above.
        groups: streams, G.
    """

    def __init__(
        self, norms: tuple[RMSNorm, RMSNorm, RMSNorm], conv: Filter, dilation: int, groups: int
    ) -> None:
        self._norms, self._conv = norms, conv
        self._dilation, self._groups = dilation, groups

    def bind(self, kernels: KernelSet) -> None:
        """Nothing to look up: no target has a body."""

    def __call__(
        self, key: mx.array, value: mx.array, h: mx.array, tail: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What the streams gain from T rows.

        Args:
            key: [T, G * C].
            value: [T, C].
            h: [T, G * C].
            tail: [(taps - 1) * dilation, G * C], what the filter saw of the rows before.

        Returns:
            [T, G * C] in the dtype of `h`, and what the filter saw of these rows.
        """
        T, G = h.shape[0], self._groups
        key_norm, query_norm, conv_norm = (norm.value for norm in self._norms)
        keys, queries = (
            mx.reshape(grouped_norm_reference(x, norm, G).astype(mx.float32), (T, G, -1))
            for x, norm in ((key, key_norm), (h, query_norm))
        )
        fit = (keys * queries).sum(axis=-1) * keys.shape[-1] ** -0.5  # [T, G]
        fit = mx.sign(fit) * mx.sqrt(mx.maximum(mx.abs(fit), 1e-6))
        gated = mx.sigmoid(fit)[..., None] * value.astype(mx.float32)[:, None]
        gated = mx.reshape(gated, h.shape)
        normed = grouped_norm_reference(gated, conv_norm, G)
        rows = mx.concatenate([tail, normed.astype(mx.float32)])
        taps = self._conv.weight.astype(mx.float32)[..., 0]
        total = rows[:T] * taps[:, 0]
        for tap in range(1, taps.shape[1]):
            first = tap * self._dilation
            total = total + rows[first : first + T] * taps[:, tap]
        return (gated + activate_reference(total, "silu")).astype(h.dtype), normed


class NgramLayer(nn.Module):
    """What a layer adds to its streams before it begins.

    Args:
        dims: of one stream, C.
        groups: streams, G.
        embedding: the table; it belongs to this layer.
        width: of a token's embedding.
        taps: of the filter.
        dilation: rows between two taps.
        eps: of the norms.
    """

    def __init__(
        self,
        dims: int,
        groups: int,
        embedding: NgramEmbedding,
        width: int,
        *,
        taps: int,
        dilation: int,
        eps: float,
    ) -> None:
        super().__init__()
        streams = groups * dims
        self.ple_embedding = embedding
        self.key_proj = Linear(width, streams)
        self.value_proj = Linear(width, dims)
        self.conv1d = Filter(streams, taps)
        self.norm_key, self.norm_query = RMSNorm(streams, eps), RMSNorm(streams, eps)
        self.norm_conv = RMSNorm(streams, eps)
        self._tail = ((taps - 1) * dilation, streams)
        self.project = NormedProjections(None, [self.key_proj, self.value_proj])
        norms = (self.norm_key, self.norm_query, self.norm_conv)
        self.gate = NgramGate(norms, self.conv1d, dilation, groups)

    def zero_state(self) -> State:
        """The state of position 0: the filter's rows, and the tokens before the text."""
        hashing = self.ple_embedding.hashing
        return mx.zeros(self._tail), mx.full((hashing.context,), hashing.eos, mx.int32)

    def __call__(
        self,
        h: mx.array,
        tokens: mx.array,
        cache: Any,
        phase: Phase,
        *,
        embedded: mx.array | None = None,
        record: bool = False,
    ) -> tuple[mx.array, RowInputs | None]:
        """Advance the streams h [T, G * C].

        Args:
            h: the streams.
            tokens: [T] int32, the rows' own.
            cache: advanced by T.
            phase: prefill or decode.
            embedded: [T, width], the tokens' rows where the table lies in files.
            record: whether the row inputs are returned.
        """
        tail, before = cast("State", cache.state)
        if embedded is None:
            embedded = self.ple_embedding(tokens, before)
        key, value = self.project(embedded.astype(h.dtype), phase)
        gained, normed = self.gate(key, value, h, tail)
        state = next_tail(normed, tail), next_context(tokens, before)
        cache.advance(tokens.shape[0], state)
        rows = NgramRows((tail, before), normed, tokens) if record else None
        return h + gained, rows

"""Embeddings of hashed n-grams, injected into every residual stream of a layer.

The table may be far larger than memory: then it stays in its files, and only the few rows of the
tokens at hand are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from turbospark.errors import ShapeError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.delta_net import next_tail
from turbospark.kernels.ngram import NgramHash, Numbers, next_context
from turbospark.kernels.streams import grouped_norm_reference
from turbospark.kernels.target import KernelSet
from turbospark.nn.delta_net import Filter
from turbospark.nn.linear import Embedding, Linear, RMSNorm
from turbospark.nn.projections import NormedProjections, TokenEmbedding
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase, RowInputs

State = tuple[mx.array, ...]


class RowReader(Protocol):
    """A table [rows, dims] that lies in files."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and numbers of a row."""
        ...

    def prefetch(self, rows: Numbers) -> None:
        """Tell the machine that these rows will be read."""
        ...

    def read(self, rows: Numbers) -> mx.array:
        """Rows [n, dims] in a float type, by their numbers [n]."""
        ...


class NgramTable(Embedding):
    """A table [rows, dims] in memory, or a reader of one that is left in its files."""

    def __init__(self, count: int, dims: int) -> None:
        super().__init__(count, dims)
        self.reader: RowReader | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and numbers of a row."""
        rows, dims = self._shape
        return rows, dims

    def leave_in_files(self, reader: RowReader) -> None:
        """Read rows as they are needed; the module has no parameter then.

        Raises:
            ShapeError: the files hold a table of another size.
        """
        if reader.shape != self.shape:
            raise ShapeError(f"a table {reader.shape} in files where {self.shape} is needed")
        for name in ("weight", "scales", "biases"):
            self.pop(name, None)
        self.reader = reader


class TableRows(TokenEmbedding):
    """Rows of a table in memory; of one in files there is nothing to bind."""

    def __init__(self, table: NgramTable) -> None:
        super().__init__(table)
        self._table_or_reader = table

    def bind(self, kernels: KernelSet) -> None:
        if self._table_or_reader.reader is None:
            super().bind(kernels)


class NgramEmbedding(nn.Module):
    """The table of one layer, and how tokens become rows of it.

    Args:
        hashing: of tokens.
        dims: of all heads of a token together.
    """

    def __init__(self, hashing: NgramHash, dims: int) -> None:
        super().__init__()
        self.hashing = hashing
        self.ngram_embedding = NgramTable(hashing.rows, dims // len(hashing.primes))
        self.look_up = TableRows(self.ngram_embedding)

    @property
    def reader(self) -> RowReader | None:
        """Of the table where it lies in files."""
        return self.ngram_embedding.reader

    def numbers(self, tokens: mx.array, before: mx.array) -> Numbers:
        """The rows of T tokens, on the host: [T * heads]."""
        given, past = (_on_host(part) for part in (tokens, before))
        return self.hashing.numbers(given, past).reshape(-1)

    def __call__(self, tokens: mx.array, before: mx.array) -> mx.array:
        """Embed T tokens with a table in memory: [T, dims]."""
        numbers = self.hashing.numbers_reference(tokens, before)
        return mx.reshape(self.look_up(mx.reshape(numbers, (-1,))), (tokens.shape[0], -1))


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


def table_shares(model: nn.Module) -> dict[str, float]:
    """What part of a parameter one token needs, for tables of n-grams in memory, by their names."""
    modules = cast("list[tuple[str, nn.Module]]", model.named_modules())
    found = {path: module for path, module in modules if isinstance(module, NgramEmbedding)}
    return {
        f"{path}.ngram_embedding.weight": len(module.hashing.primes) / module.hashing.rows
        for path, module in found.items()
    }


def sampled_rows(model: nn.Module, count: int) -> list[tuple[str, mx.array]]:
    """Some evenly spread rows [count, dims] of every table that lies in files, by its path."""
    modules = cast("list[tuple[str, nn.Module]]", model.named_modules())
    return [
        (path, module.reader.read(np.linspace(0, module.shape[0] - 1, count).astype(np.int64)))
        for path, module in modules
        if isinstance(module, NgramTable) and module.reader is not None
    ]


def _on_host(ids: mx.array) -> Numbers:
    return np.array(ids, dtype=np.int64)  # host memory: rows of files


def rows_in_files(
    layers: Sequence[tuple[NgramEmbedding, Any]], tokens: mx.array
) -> list[mx.array | None]:
    """Read what tokens need of tables that lie in files, one request for all of them.

    Args:
        layers: the embedding of each n-gram layer, and its cache at the tokens' first position.
        tokens: [T] int32; they are waited for if a table lies in files.

    Returns:
        [T, width] of each layer, or None where its table lies in memory.
    """
    wanted = [
        None if embedding.reader is None else embedding.numbers(tokens, cache.state[1])
        for embedding, cache in layers
    ]
    readers = [embedding.reader for embedding, _ in layers]
    for reader, numbers in zip(readers, wanted, strict=True):
        if reader is not None and numbers is not None:
            reader.prefetch(numbers)
    return [
        None
        if reader is None or numbers is None
        else mx.reshape(reader.read(numbers), (tokens.shape[0], -1))
        for reader, numbers in zip(readers, wanted, strict=True)
    ]

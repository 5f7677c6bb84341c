"""Tables of hashed n-grams, in memory or read by the row from files.

A table may be far larger than memory: then it stays in its files, and only the few rows of the
tokens at hand are read.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from turbospark.errors import ShapeError
from turbospark.kernels.ngram import NgramHash, Numbers
from turbospark.kernels.target import KernelSet
from turbospark.nn.linear import Embedding
from turbospark.nn.projections import TokenEmbedding


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

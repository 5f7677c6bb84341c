"""A model that follows a script.

`ScriptedModel` computes nothing and remembers everything: its logits depend on every token its
caches hold, so any slip in what is fed, kept or taken back changes the text or raises.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from turbospark.protocols import ForwardOutput, LogitRows, Phase
from turbospark.testing.caches import (
    ScriptedCache,
    ScriptedRows,
    checksum,
    folded,
    scripted_recurrent_cache,
)

LogitsOf = Callable[[Sequence[int]], NDArray[Any]]
"""Every token so far -> the logits [V] that follow them."""


def hashed_logits(vocab_size: int, spread: float = 3.0) -> LogitsOf:
    """Logits that are random in looks and fixed by the whole text before them."""

    def logits(ids: Sequence[int]) -> NDArray[Any]:
        seed = zlib.crc32(np.asarray(ids, dtype=np.int32).tobytes())
        return np.random.default_rng(seed).normal(scale=spread, size=vocab_size)

    return logits


def scripted_logits(vocab_size: int, script: Sequence[int], prompt_tokens: int) -> LogitsOf:
    """Logits whose argmax spells `script` after a prompt of so many tokens, then its last id."""

    def logits(ids: Sequence[int]) -> NDArray[Any]:
        row = np.zeros(vocab_size)
        row[script[min(max(len(ids) - prompt_tokens, 0), len(script) - 1)]] = 9.0
        return row

    return logits


def fingerprints(ids: Sequence[int], start: int = 0) -> NDArray[Any]:
    """Rows [T, 3] float32 that only these ids have: 24 bits of a checksum, position, token."""
    rows = np.empty((len(ids) - start, 3), dtype=np.float32)
    raw = np.asarray(ids, dtype=np.int32)
    for index in range(start, len(ids)):
        rows[index - start] = zlib.crc32(raw[: index + 1].tobytes()) & 0xFFFFFF, index, ids[index]
    return rows


class ScriptedModel:
    """A model without weights. It refuses caches that have come apart.

    Args:
        logits_of: the logits after a text; `hashed_logits` by default.
        vocab_size: ids it takes.
        reach: of its second cache, which plays a ring; the first can always go back.
        recurrent: how many recurrent caches follow them.
        fail_on: raise when this token is fed; the caches have advanced by then.
        poison: a token that makes layer `bad_layer` and all after it non-finite.
        bad_layer: see `poison`; `num_layers` spoils the logits alone.

    Attributes:
        calls: (phase, tokens, which logits) of every pass.
        takes_chunks: whether it serves passes of many prompt tokens; may be set.
        records_rows: whether its recurrent layers can be cut short after a pass; may be set.
    """

    num_layers = 5
    max_position: int | None = None

    def __init__(
        self,
        logits_of: LogitsOf | None = None,
        *,
        vocab_size: int = 259,
        reach: int | None = None,
        recurrent: int = 0,
        fail_on: int | None = None,
        poison: int | None = None,
        bad_layer: int = 3,
    ) -> None:
        self.vocab_size = vocab_size
        self.calls: list[tuple[Phase, int, LogitRows]] = []
        self.fail_on = fail_on
        self.poison = poison
        self.takes_chunks = True
        self.records_rows = True
        self.logits_of = logits_of or hashed_logits(vocab_size)
        self._reach = reach
        self._recurrent = recurrent
        self._bad_layer = bad_layer

    def make_caches(self, max_context: int, slack: int) -> list[Any]:
        """One cache that goes back all the way, one as far as `reach`, then the recurrent ones."""
        recurrent = (scripted_recurrent_cache(max_context) for _ in range(self._recurrent))
        return [ScriptedCache(), ScriptedCache(self._reach), *recurrent]

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """There is nothing to rename."""
        return dict(weights)

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
        """Append tokens to the caches and look the logits up."""
        fed = [int(token) for token in np.asarray(tokens)]
        self.calls.append((phase, len(fed), logits))
        before = list(caches[0].ids)
        row_inputs = self._advance(caches, before, fed)
        if self.fail_on in fed:
            raise RuntimeError(f"token {self.fail_on} was scripted to fail")
        count = {"none": 0, "last": 1, "all": len(fed)}[logits]
        everything = [*before, *fed]
        ends = range(len(everything) - count, len(everything))
        rows = [self._row(everything[: end + 1]) for end in ends]
        return ForwardOutput(
            mx.array(np.array(rows, dtype=np.float32)) if rows else None,
            {layer: self._residual(everything, len(before), layer) for layer in taps},
            mx.array(fingerprints(everything, len(before))) if hidden else None,
            row_inputs if record and self.records_rows else {},
        )

    def _advance(
        self, caches: Sequence[Any], before: Sequence[int], fed: Sequence[int]
    ) -> dict[int, ScriptedRows]:
        noted: dict[int, ScriptedRows] = {}
        (now,) = folded(0, before)
        for index, cache in enumerate(caches):
            if cache.offset != len(before):
                raise AssertionError("the caches have come apart")
            if not cache.recurrent:
                if cache.ids != before:
                    raise AssertionError("the caches have come apart")
                cache.extend(fed)
                continue
            held = checksum(cache)
            if held != int(np.asarray(now)[0]):
                raise AssertionError("a recurrent state is not that of the tokens before it")
            noted[index] = ScriptedRows(held, fed)
            cache.advance(len(fed), folded(held, fed))
        return noted

    def _row(self, ids: Sequence[int]) -> NDArray[Any]:
        spoilt = self.poison is not None and self.poison in ids
        return np.full(self.vocab_size, np.nan) if spoilt else self.logits_of(ids)

    def _residual(self, ids: Sequence[int], start: int, layer: int) -> mx.array:
        rows = fingerprints(ids, start)
        if self.poison in ids and layer >= self._bad_layer:
            rows[max(list(ids).index(self.poison or 0) - start, 0) :] = np.inf
        return mx.array(rows)

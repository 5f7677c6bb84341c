"""A model and a producer that follow a script.

`ScriptedModel` computes nothing and remembers everything: its logits depend on every token its
caches hold, so any slip in what is fed, kept or taken back changes the text.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from turbospark.errors import RewindError
from turbospark.protocols import ForwardOutput, LogitRows, Phase, Reuse

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


class ScriptedCache:
    """Remembers ids instead of rows.

    Args:
        reach: how many tokens `rewind` can take back; None is all of them.
    """

    def __init__(self, reach: int | None = None) -> None:
        self.ids: list[int] = []
        self.rewinds: list[int] = []
        self._reach = reach

    @property
    def offset(self) -> int:
        """Tokens fed so far."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Four bytes an id."""
        return 4 * len(self.ids)

    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back."""
        return self.offset if self._reach is None else min(self._reach, self.offset)

    def rewind(self, count: int) -> None:
        """Take back exactly `count` tokens."""
        if not 0 <= count <= self.max_rewind():
            raise RewindError(f"a scripted cache of {self.offset} tokens cannot rewind by {count}")
        self.rewinds.append(count)
        del self.ids[self.offset - count :]

    def fork(self) -> "ScriptedCache":
        """An independent copy."""
        twin = ScriptedCache(self._reach)
        twin.ids = list(self.ids)
        return twin


class ScriptedModel:
    """A model without weights.

    Args:
        logits_of: the logits after a text.
        vocab_size: ids it takes.
        reach: of its second cache, which plays a ring; the first can always go back.
        fail_on: raise when this token is fed.
        poison: a token that makes layer `bad_layer` and all after it non-finite.
        bad_layer: see `poison`; `num_layers` spoils the logits alone.
    """

    num_layers = 5
    max_position: int | None = None

    def __init__(
        self,
        logits_of: LogitsOf | None = None,
        *,
        vocab_size: int = 259,
        reach: int | None = None,
        fail_on: int | None = None,
        poison: int | None = None,
        bad_layer: int = 3,
    ) -> None:
        self.vocab_size = vocab_size
        self.calls: list[tuple[Phase, int, LogitRows]] = []
        self.fail_on = fail_on
        self.poison = poison
        self._logits_of = logits_of or hashed_logits(vocab_size)
        self._reach = reach
        self._bad_layer = bad_layer

    def make_caches(self, max_context: int, slack: int) -> list[ScriptedCache]:
        """Two caches: one that goes back all the way, one only as far as `reach`."""
        return [ScriptedCache(), ScriptedCache(self._reach)]

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
    ) -> ForwardOutput:
        """Append tokens to the caches and look the logits up."""
        fed = [int(token) for token in np.asarray(tokens)]
        self.calls.append((phase, len(fed), logits))
        before = list(caches[0].ids)
        for cache in caches:
            if cache.ids != before:
                raise AssertionError("the caches have come apart")
            cache.ids.extend(fed)
        if self.fail_on in fed:
            raise RuntimeError(f"token {self.fail_on} was scripted to fail")
        count = {"none": 0, "last": 1, "all": len(fed)}[logits]
        ends = range(len(before) + len(fed) - count, len(before) + len(fed))
        everything = [*before, *fed]
        rows = [self._row(everything[: end + 1]) for end in ends]
        residuals = {layer: self._residual(everything, len(fed), layer) for layer in taps}
        if not rows:
            return ForwardOutput(None, residuals)
        return ForwardOutput(mx.array(np.array(rows, dtype=np.float32)), residuals)

    def _row(self, ids: Sequence[int]) -> NDArray[Any]:
        spoilt = self.poison is not None and self.poison in ids
        return np.full(self.vocab_size, np.nan) if spoilt else self._logits_of(ids)

    def _residual(self, ids: Sequence[int], count: int, layer: int) -> mx.array:
        rows = np.ones((len(ids), 3), dtype=np.float32)
        if self.poison in ids and layer >= self._bad_layer:
            rows[list(ids).index(self.poison or 0) :] = np.inf
        return mx.array(rows[len(ids) - count :])


class ScriptedProducer:
    """A producer without chunks that polices its own cursor.

    Args:
        logits_of: the logits after a text.
        overclaim: `try_reuse_prefix` then claims this many tokens, whatever the prompt.
    """

    def __init__(self, logits_of: LogitsOf, overclaim: int = 0) -> None:
        self.fed: list[int] = []
        self.calls: list[str] = []
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

    def produce_prefill(self, token: int, position: int) -> None:
        """Take one prompt token."""
        self._take("produce_prefill", token, position)

    def produce(self, token: int, position: int) -> mx.array:
        """Take one token and look the logits up."""
        self._take("produce", token, position)
        return mx.array(self._logits_of(self.fed).astype(np.float32))

    def _take(self, call: str, token: int, position: int) -> None:
        if position != len(self.fed):
            raise AssertionError(f"{call} at {position}, cursor at {len(self.fed)}")
        self.calls.append(call)
        self.fed.append(token)

"""Caches that remember ids instead of rows."""

import zlib
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from turbospark.caches.recurrent import RecurrentCache
from turbospark.errors import CheckpointError, RewindError


class ScriptedCache:
    """Remembers ids instead of rows.

    Args:
        reach: how many tokens `rewind` can take back; None is all of them.

    Attributes:
        rewinds: the counts of every rewind so far.
        furthest: the most tokens it ever held.
    """

    recurrent = False

    def __init__(self, reach: int | None = None) -> None:
        self.ids: list[int] = []
        self.rewinds: list[int] = []
        self.furthest = 0
        self.rewind_bound = reach

    @property
    def offset(self) -> int:
        """Tokens fed so far."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Four bytes an id."""
        return 4 * len(self.ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Take more tokens."""
        self.ids.extend(ids)
        self.furthest = max(self.furthest, len(self.ids))

    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back."""
        return self.offset if self.rewind_bound is None else min(self.rewind_bound, self.offset)

    def rewind(self, count: int) -> None:
        """Take back exactly `count` tokens."""
        if not 0 <= count <= self.max_rewind():
            raise RewindError(f"a scripted cache of {self.offset} tokens cannot rewind by {count}")
        self.rewinds.append(count)
        del self.ids[self.offset - count :]

    def fork(self) -> "ScriptedCache":
        """An independent copy."""
        twin = ScriptedCache(self.rewind_bound)
        twin.extend(self.ids)
        return twin

    def export(self) -> dict[str, mx.array]:
        """The ids."""
        return {"ids": mx.array(self.ids, dtype=mx.int32)}

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave."""
        if set(arrays) != {"ids"}:
            raise CheckpointError(f"a scripted cache takes ids, not {sorted(arrays)}")
        self.ids = []
        self.extend([int(token) for token in np.asarray(arrays["ids"])])


class ScriptedRows:
    """What a scripted recurrent layer notes of a pass.

    Args:
        before: the state before it.
        tokens: what was fed.
    """

    def __init__(self, before: int, tokens: Sequence[int]) -> None:
        self._before = before
        self._tokens = list(tokens)

    @property
    def rows(self) -> int:
        """Tokens of the pass."""
        return len(self._tokens)

    def replay(self, keep: int) -> tuple[mx.array, ...]:
        """The state after the first `keep` of them."""
        if not 1 <= keep <= self.rows:
            raise AssertionError(f"replay({keep}) of {self.rows} rows")
        return folded(self._before, self._tokens[:keep])

    def arrays(self) -> tuple[mx.array, ...]:
        """The state before, and the tokens."""
        return mx.array([self._before], mx.int64), mx.array(self._tokens, mx.int32)

    def like(self, arrays: Sequence[mx.array]) -> "ScriptedRows":
        """The same over other arrays."""
        before, tokens = (np.asarray(array).tolist() for array in arrays)
        return ScriptedRows(before[0], tokens)


def folded(before: int, tokens: Sequence[int]) -> tuple[mx.array, ...]:
    """A state after more tokens: a checksum that depends on every one and on their order."""
    return (mx.array([zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes(), before)], mx.int64),)


def checksum(cache: RecurrentCache) -> int:
    """The number that a scripted recurrent cache holds."""
    return int(np.asarray(cache.state[0])[0])


def scripted_recurrent_cache(max_context: int) -> RecurrentCache:
    """A recurrent cache whose state is the checksum of all tokens so far."""
    return RecurrentCache(lambda: folded(0, []), max_context)

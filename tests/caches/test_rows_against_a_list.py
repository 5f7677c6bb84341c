"""Appends, in-place writes, rewinds, forks and exports in any order, against plain lists."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
from caches.models import DIM, HEADS, numbered, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from turbospark.caches import base
from turbospark.caches.base import RowCache
from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import ContextLengthError, RewindError

MAX_CONTEXT = 61
WINDOW, SLACK = 7, 6


@dataclass
class Twin:
    """A cache and the list it must agree with."""

    cache: RowCache
    tokens: list[int]
    furthest: int = 0

    def add(self, start: int, count: int, in_place: bool) -> None:
        k, v = numbered(start, count)
        if in_place:
            block, row = self.cache.reserve(count)
            for to, rows in ((block.k, k), (block.v, v)):
                np.asarray(to)[:, row : row + count] = np.array(rows).swapaxes(0, 1)
            self.cache.advance(count)
        else:
            self.cache.append(k, v)
        self.tokens = [*self.tokens, *range(start, start + count)]
        self.furthest = max(self.furthest, len(self.tokens))

    @property
    def max_rewind(self) -> int:
        """What a ring of capacity window + slack without any tail could take back."""
        offset = len(self.tokens)
        if isinstance(self.cache, KVCache) or self.furthest <= WINDOW + SLACK:
            return offset
        oldest_held = self.furthest - (WINDOW + SLACK)
        return max(0, offset - oldest_held - WINDOW)

    def check(self, new: int = 0) -> None:
        cache, offset = self.cache, len(self.tokens)
        assert cache.offset == offset
        assert cache.max_rewind() == self.max_rewind
        seen = 0 if isinstance(cache, KVCache) else max(0, offset - max(new, 1) - WINDOW + 1)
        if offset:
            first = cache.rows().first
            assert first <= seen
            assert numbers(cache.rows(), first) == self.tokens[first:]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "write", "rewind", "fork", "restore"]),
        st.integers(0, 3),
        st.integers(1, 5) | st.integers(1, 24),
    ),
    max_size=16,
)


@pytest.mark.parametrize("kind", ["full", "ring"])
@settings(max_examples=80, deadline=None)
@given(operations=OPERATIONS)
def test_rows_equal_a_list_after_any_operations(kind, operations):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "TAIL_ROWS", 4)
        play(kind, operations)


def play(kind: str, operations: list[tuple[str, int, int]]) -> None:
    if kind == "full":
        cache: RowCache = KVCache(HEADS, DIM, MAX_CONTEXT)
    else:
        cache = RingCache(HEADS, DIM, MAX_CONTEXT, WINDOW, SLACK)
    fresh = cache.fork()
    twins, serial = [Twin(cache, [])], 0
    for name, which, count in operations:
        twin, new = twins[which % len(twins)], 0
        if name == "fork":
            twins.append(Twin(twin.cache.fork(), twin.tokens, twin.furthest))
        elif name == "restore":
            restored = fresh.fork()
            restored.restore(twin.cache.export())
            twins.append(Twin(restored, twin.tokens, twin.furthest))
        elif name == "rewind":
            rewind(twin, count)
        elif len(twin.tokens) + count > MAX_CONTEXT:
            with pytest.raises(ContextLengthError, match=f"cannot take {count} more"):
                twin.add(serial, count, in_place=name == "write")
        else:
            twin.add(serial, count, in_place=name == "write")
            new = count
        serial += count
        for other in twins:
            other.check(new if other is twin else 0)


def rewind(twin: Twin, count: int) -> None:
    before = copy.copy(twin.cache)
    if count > twin.max_rewind:
        with pytest.raises(RewindError, match=f"cannot rewind by {count}:"):
            twin.cache.rewind(count)
        assert vars(twin.cache) == vars(before)
    else:
        twin.cache.rewind(count)
        twin.tokens = twin.tokens[: len(twin.tokens) - count]

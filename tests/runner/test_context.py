"""How long a session may get."""

import pytest

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.runner.context import choose_max_context, row_bytes


@pytest.mark.parametrize(
    ("wish", "trained", "row", "free", "expected"),
    [
        (7, 100, 10, 10, 7),
        (None, 1000, 10, None, 1000),
        (None, 1000, 0, 10, 1000),
        (None, 100_000, 100, 10_000_000, 49_920),
        (None, 100_000, 100, 10, 256),
        (None, 100, 100, 10, 100),
        (None, None, 100, None, 4096),
        (None, None, 100, 10**9, 4096),
        (None, None, 100, 200_000, 768),
    ],
)
def test_the_wish_wins_then_training_bounded_by_memory(
    wish: int | None, trained: int | None, row: int, free: int | None, expected: int
) -> None:
    assert choose_max_context(wish, trained, row, free) == expected


def test_only_caches_that_grow_count() -> None:
    caches = [KVCache(3, 20, 9), RingCache(3, 20, 9, 5, 2), KVCache(1, 7, 9)]
    assert row_bytes(caches) == 2 * 4 * (3 * 20 + 7)

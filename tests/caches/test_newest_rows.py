"""The newest rows of a cache, read in the order of their positions."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import ShapeError
from turbospark.kernels.kv_rows import newest_rows


def numbered(first, count):
    """Rows [count, 3, 5] that tell their position, and values that are their negatives."""
    k = mx.broadcast_to(mx.arange(first, first + count)[:, None, None], (count, 3, 5))
    return k.astype(mx.float32), -k.astype(mx.float32)


def fill(cache, size, count=400):
    while cache.offset < count:
        cache.append(*numbered(cache.offset, min(size, count - cache.offset)))
    return cache


@pytest.mark.parametrize("size", [1, 7, 129, 400])
@pytest.mark.parametrize("begin", [393, 399, 300, 128, 127, 0])
def test_rows_come_in_their_order(size, begin):
    k, v = newest_rows(fill(KVCache(3, 5, 500), size).rows(), begin)
    assert k.shape == v.shape == (3, 400 - begin, 5)
    assert np.array_equal(np.array(k[1, :, 2]), np.arange(begin, 400))
    assert np.array_equal(np.array(v), -np.array(k))


@pytest.mark.parametrize("size", [1, 7, 129])
def test_a_rings_window_is_there_after_it_has_wrapped(size):
    cache = fill(RingCache(3, 5, 500, window=11, slack=4), size)
    for back in (0, 4):
        cache.rewind(back)
        end = cache.offset
        k, _ = newest_rows(cache.rows(), end - 11)
        assert np.array_equal(np.array(k[0, :, 0]), np.arange(end - 11, end))


def test_rows_that_are_gone_or_not_there_yet_are_refused():
    cache = fill(RingCache(3, 5, 500, window=11, slack=4), 7)
    for begin in (0, 400):
        with pytest.raises(ShapeError, match=f"rows from position {begin} on"):
            newest_rows(cache.rows(), begin)

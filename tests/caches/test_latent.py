"""The cache of latent attention: rows of one head whose two parts differ in width."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.caches.kv import KVCache
from turbospark.caches.latent import LatentCache
from turbospark.errors import CheckpointError, ContextLengthError, ShapeError
from turbospark.loading.plan import session_bytes
from turbospark.runner.context import row_bytes

LATENT, ROPE = 13, 6


def numbered(start, count):
    """Rows whose first number is their position."""
    rows = mx.arange(start, start + count).astype(mx.float32)[:, None, None]
    return mx.broadcast_to(rows, (count, 1, ROPE)), mx.broadcast_to(-rows, (count, 1, LATENT))


def fed(count, chunk, max_context=512):
    cache = LatentCache(LATENT, ROPE, max_context)
    for at in range(0, count, chunk):
        cache.append(*numbered(at, min(chunk, count - at)))
    return cache


@pytest.mark.parametrize("chunk", [1, 7, 129, 300])
def test_rows_lie_in_order_however_they_came(chunk):
    found = fed(300, chunk).export()
    assert found["k"].shape == (1, 300, ROPE)
    assert found["v"].shape == (1, 300, LATENT)
    for name, sign in (("k", 1), ("v", -1)):
        assert np.array_equal(np.array(found[name])[0, :, -1] * sign, np.arange(300))


def test_a_position_takes_one_row_for_all_heads():
    cache = fed(300, 64)
    assert cache.nbytes == (256 + 128) * (LATENT + ROPE) * 4
    assert row_bytes([cache, cache]) == 2 * (LATENT + ROPE) * 4
    assert row_bytes([KVCache(3, 5, 64)]) == 2 * 3 * 5 * 4


def test_what_is_planned_is_what_is_held():
    planned = session_bytes([LatentCache(LATENT, ROPE, 700)], 700)
    held = LatentCache(LATENT, ROPE, 700)
    for at in range(0, 700, 256):
        block, row = held.reserve(min(256, 700 - at))
        assert (block.k.shape[2], block.v.shape[2], row) == (ROPE, LATENT, 0)
        held.advance(min(256, 700 - at))
    assert planned == held.nbytes


@pytest.mark.parametrize("count", [1, 60, 200, 300])
def test_it_goes_back_any_distance(count):
    cache, fork = fed(300, 37), None
    fork = cache.fork()
    cache.rewind(count)
    assert cache.max_rewind() == cache.offset == 300 - count
    cache.append(*numbered(300 - count, count))
    ours, theirs = cache.export(), fork.export()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ("k", "v"))


@pytest.mark.parametrize("swap", [True, False])
def test_rows_of_another_width_are_refused(swap):
    cache = fed(3, 3)
    k, v = numbered(3, 2)
    with pytest.raises(ShapeError, match="are needed"):
        cache.append(*((v, k) if swap else (k, v[:, :, :-1])))
    assert cache.offset == 3
    with pytest.raises(ContextLengthError, match=r"LatentCache\(max_context=512\) at 3 tokens"):
        cache.append(*numbered(3, 510))


def test_it_takes_back_its_own_rows_only():
    saved = fed(30, 7).export()
    cache = LatentCache(LATENT, ROPE, 512)
    with pytest.raises(CheckpointError, match=r"takes rows \(1, 30, 6\) and \(1, 30, 13\), not"):
        cache.restore(saved | {"v": saved["k"]})
    cache.restore(saved)
    again = cache.export()
    assert all(np.array_equal(again[name], saved[name]) for name in saved)

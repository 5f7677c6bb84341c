"""Rows as arrays for a file: exact, and nothing but those of a cache alike is taken."""

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import pytest
from caches.models import DIM, HEADS, numbered, numbers

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import CheckpointError

WINDOW, SLACK = 37, 20


def full(max_context=4096):
    return KVCache(HEADS, DIM, max_context)


def ring(slack=SLACK, max_context=4096, window=WINDOW):
    return RingCache(HEADS, DIM, max_context, window, slack)


def fed(cache, count, chunk):
    for at in range(0, count, chunk):
        cache.append(*numbered(at, min(chunk, count - at)))
    return cache


def same(one: Mapping[str, mx.array], other: Mapping[str, mx.array]) -> bool:
    return one.keys() == other.keys() and all(mx.array_equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("make", [full, ring])
@pytest.mark.parametrize("count", [0, 1, 57, 58, 130, 403])
def test_the_arrays_do_not_depend_on_how_the_rows_came_in(make, count):
    expected = fed(make(), count, max(count, 1)).export()
    for chunk in (1, 7, 129, 260):
        assert same(fed(make(), count, chunk).export(), expected)


@pytest.mark.parametrize("make", [full, ring])
def test_only_written_rows_are_exported(make):
    cache = fed(make(), 300, 11)
    cache.rewind(5)
    k = cache.export()["k"]
    kept = 295 if make is full else WINDOW + SLACK - 5
    assert k.shape == (HEADS, kept, DIM)
    assert np.array(k)[0, :, 0].tolist() == list(range(295 - kept, 295))


@pytest.mark.parametrize("make", [full, ring])
@pytest.mark.parametrize("back", [0, 9])
def test_a_restored_cache_goes_on_as_if_never_saved(make, back):
    saved = fed(make(), 300, 64)
    saved.rewind(back)
    restored = make()
    restored.restore(saved.export())
    assert (restored.offset, restored.max_rewind()) == (saved.offset, saved.max_rewind())
    first = 0 if make is full else 291 - 36
    for cache in (saved, restored):
        cache.append(*numbered(1000, 3))
        cache.rewind(2)
        assert numbers(cache.rows(), first)[-2:] == [299 - back, 1000]
    assert restored.max_rewind() == saved.max_rewind()
    assert same(restored.export(), saved.export())


def test_a_ring_of_another_slack_keeps_what_both_have_room_for():
    arrays = fed(ring(slack=20), 300, 64).export()
    narrow, wide = ring(slack=6), ring(slack=90)
    for cache, reach in ((narrow, 6), (wide, 20)):
        cache.restore(arrays)
        assert cache.max_rewind() == reach
        assert numbers(cache.rows(), 300 - 36) == list(range(264, 300))
    wide.append(*numbered(300, 50))
    assert wide.max_rewind() == 70


def test_a_longer_or_a_shorter_context_takes_the_rows_where_they_fit():
    arrays = fed(full(), 300, 64).export()
    cache = full(max_context=301)
    cache.restore(arrays)
    assert numbers(cache.rows(), 0) == list(range(300))
    with pytest.raises(CheckpointError, match="max_context=300 or more"):
        full(max_context=299).restore(arrays)


def changed(arrays, **values):
    return {name: value for name, value in {**arrays, **values}.items() if value is not None}


def span(*values):
    return mx.array(values, mx.int64)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"k": None}, "not \\['span', 'v'\\]"),
        ({"extra": mx.zeros(1)}, "'extra'"),
        ({"span": None}, "another cache"),
        ({"span": mx.array([0, 60, 0])}, "another cache"),
        ({"span": span(0, 61, 0)}, r"takes rows \(3, 61, 5\)"),
        ({"span": span(0, 60, 37)}, "has no window, the rows given have a window of 37"),
        ({"span": span(3, 60, 0)}, "none that"),
        ({"span": span(-1, 60, 0)}, "none that"),
        ({"span": span(61, 60, 0)}, "none that"),
        ({"v": mx.zeros((HEADS, 59, DIM))}, r"takes rows \(3, 60, 5\), not"),
        ({"k": mx.zeros((HEADS, 60, DIM), mx.int32)}, "holds rows of"),
        ({"k": mx.zeros((HEADS, 60, DIM), mx.float16)}, "holds rows of"),
    ],
)
def test_arrays_of_another_cache_are_refused_and_nothing_changes(values, said):
    arrays = fed(full(), 60, 60).export()
    cache = fed(full(), 9, 9)
    with pytest.raises(CheckpointError, match=said):
        cache.restore(changed(arrays, **values))
    assert numbers(cache.rows(), 0) == list(range(9))


@pytest.mark.parametrize("first", [0, 264])
def test_a_wrapped_ring_needs_its_window(first):
    arrays = fed(ring(), 300, 64).export()
    rows = {name: arrays[name][:, :36] for name in "kv"}
    with pytest.raises(CheckpointError):
        ring().restore(
            {**rows, "span": span(first, first + 36, WINDOW)} if first else arrays | rows
        )


@pytest.mark.parametrize("other", [lambda: KVCache(2, DIM, 99), lambda: KVCache(HEADS, 8, 99)])
def test_rows_of_other_heads_are_refused(other):
    with pytest.raises(CheckpointError, match="takes rows"):
        other().restore(fed(full(), 60, 60).export())


def test_a_ring_takes_no_rows_of_another_window():
    with pytest.raises(CheckpointError, match="a window of 36"):
        ring(window=36).restore(fed(ring(), 60, 60).export())
    with pytest.raises(CheckpointError, match="no window"):
        ring().restore(fed(full(), 60, 60).export())

"""A recurrent state is a value: kept references stay right whatever happens to the cache."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.caches.recurrent import RecurrentCache
from turbospark.errors import CheckpointError, ContextLengthError, RewindError, ShapeError

SHAPES = (3, 7), (2, 5, 11)


def zeros():
    return tuple(mx.zeros(shape) for shape in SHAPES)


def filled(value):
    return tuple(mx.full(shape, value) for shape in SHAPES)


def cache_at(count=4, max_context=9):
    cache = RecurrentCache(zeros, max_context)
    cache.advance(count, filled(float(count)))
    return cache


def test_it_starts_with_zeros_at_position_zero():
    cache = RecurrentCache(zeros, 9)
    assert (cache.offset, cache.nbytes) == (0, 0)
    assert all(not np.array(array).any() for array in cache.state)
    assert cache.nbytes == 4 * (3 * 7 + 2 * 5 * 11)


def test_two_caches_do_not_share_their_first_state():
    one, other = RecurrentCache(zeros, 9), RecurrentCache(zeros, 9)
    assert one.state[0] is not other.state[0]


def test_a_step_replaces_the_state_and_keeps_the_old_one():
    cache = cache_at()
    before = cache.state
    cache.advance(3, filled(7.0))
    assert cache.offset == 7
    assert cache.state[1][0, 0, 0].item() == 7.0
    assert all((np.array(array) == 4.0).all() for array in before)


def test_place_goes_back_to_a_checkpoint_by_reference():
    cache = cache_at()
    point = (cache.offset, cache.state)
    cache.advance(2, filled(6.0))
    cache.place(*point)
    assert cache.offset == 4
    assert cache.state is point[1]


def test_a_state_of_other_shapes_is_refused_and_moves_nothing():
    cache = cache_at()
    for call in (cache.advance, cache.place):
        with pytest.raises(ShapeError, match="takes a state of shapes"):
            call(1, (mx.zeros((3, 7)), mx.zeros((2, 5, 12))))
        with pytest.raises(ShapeError):
            call(1, (mx.zeros((3, 7)),))
    assert cache.offset == 4


def test_it_takes_no_more_than_its_context():
    cache = cache_at(count=9)
    before = cache.state
    with pytest.raises(ContextLengthError, match="cannot take 1 more: max_context is 9"):
        cache.advance(1, filled(10.0))
    assert (cache.offset, cache.state) == (9, before)


@pytest.mark.parametrize("count", [1, 4, -1])
def test_it_rewinds_nothing(count):
    cache = cache_at()
    cache.rewind(0)
    assert cache.max_rewind() == 0
    with pytest.raises(RewindError, match="cannot rewind by"):
        cache.rewind(count)
    assert cache.offset == 4


def test_forks_step_on_their_own():
    cache = cache_at()
    fork = cache.fork()
    assert fork.state is cache.state
    fork.advance(1, filled(5.0))
    cache.advance(2, filled(6.0))
    assert (cache.offset, fork.offset) == (6, 5)
    assert (cache.state[0][0, 0].item(), fork.state[0][0, 0].item()) == (6.0, 5.0)


@pytest.mark.parametrize("count", [0, 4])
def test_a_restored_cache_stands_where_the_exported_one_stood(count):
    cache = RecurrentCache(zeros, 9)
    if count:
        cache.advance(count, filled(float(count)))
    restored = RecurrentCache(zeros, 9)
    restored.restore(cache.export())
    assert restored.offset == count
    for ours, theirs in zip(restored.state, cache.state, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state1": mx.zeros((2, 5, 12))}, "holds state1 as"),
        ({"state1": mx.zeros((2, 5, 11), mx.bfloat16)}, "bfloat16"),
        ({"state1": None}, "not .*offset.*state0"),
        ({"state2": mx.zeros((1,))}, "state2"),
        ({"offset": None}, "of another cache"),
        ({"offset": mx.array([4.0])}, "of another cache"),
        ({"offset": mx.array([4, 4], mx.int64)}, "of another cache"),
        ({"offset": mx.array([10], mx.int64)}, "max_context=10"),
        ({"offset": mx.array([-1], mx.int64)}, "cannot stand at -1"),
        ({"offset": mx.array([0], mx.int64)}, r"takes \['offset'\]"),
    ],
)
def test_arrays_of_another_cache_are_refused_and_change_nothing(change, message):
    arrays = cache_at().export() | change
    cache = cache_at(count=3)
    before = cache.state
    with pytest.raises(CheckpointError, match=message):
        cache.restore({name: array for name, array in arrays.items() if array is not None})
    assert (cache.offset, cache.state) == (3, before)

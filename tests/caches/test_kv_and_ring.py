import mlx.core as mx
import numpy as np
import pytest
from caches.models import DIM, HEADS, numbered, numbers

from turbospark.caches.base import TAIL_ROWS
from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import ContextLengthError, RewindError, ShapeError
from turbospark.kernels.attention import attend_reference


def ring(window, slack, max_context=4096):
    return RingCache(HEADS, DIM, max_context, window, slack)


def feed(cache, start, count, chunk=None):
    chunk = chunk or count
    for at in range(start, start + count, chunk):
        cache.append(*numbered(at, min(chunk, start + count - at)))


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_ring_keeps_the_window_of_a_prompt_of_any_chunk_size(chunk):
    cache = ring(window=37, slack=5)
    feed(cache, 0, 300, chunk)
    assert numbers(cache.rows(), 300 - 37) == list(range(263, 300))


def test_chunk_longer_than_the_ring_still_holds_the_window_of_its_first_query():
    cache = ring(window=37, slack=5)
    feed(cache, 0, 50)
    feed(cache, 50, 200)
    assert numbers(cache.rows(), 50 - 36) == list(range(14, 250))


def test_ring_rewinds_one_token_of_a_prompt_of_two_windows():
    cache = ring(window=37, slack=5)
    feed(cache, 0, 74)
    cache.rewind(1)
    assert cache.offset == 73
    assert numbers(cache.rows(), 73 - 36) == list(range(37, 73))


@pytest.mark.parametrize("slack", [37, 38, 128])
def test_rewind_past_the_window_is_exact_or_refused(slack):
    cache = ring(window=37, slack=slack)
    feed(cache, 0, 200)
    if slack < 38:
        with pytest.raises(RewindError):
            cache.rewind(38)
        assert cache.offset == 200
        cache.rewind(37)
    else:
        cache.rewind(38)
        assert numbers(cache.rows(), 162 - 36) == list(range(126, 162))


def test_ring_refuses_rewind_past_slack_by_name():
    cache = ring(window=1024, slack=128, max_context=8192)
    feed(cache, 0, 5000, 1000)
    with pytest.raises(RewindError) as refused:
        cache.rewind(300)
    assert str(refused.value) == (
        "RingCache(window=1024, slack=128) at 5000 tokens cannot rewind by 300: only the newest "
        "128 are kept past the window; prefill again from token 0"
    )


def test_ring_as_long_as_the_context_rewinds_like_a_full_cache():
    cache = ring(window=37, slack=128, max_context=90)
    feed(cache, 0, 90, 9)
    assert cache.max_rewind() == 90
    cache.rewind(90)
    assert (cache.offset, cache.max_rewind()) == (0, 0)


def test_each_rewind_leaves_less_to_rewind():
    cache = ring(window=37, slack=20)
    feed(cache, 0, 200, 11)
    cache.rewind(15)
    assert cache.max_rewind() == 5
    with pytest.raises(RewindError, match="only the newest 5 are kept"):
        cache.rewind(6)
    feed(cache, 1000, 15)
    assert cache.max_rewind() == 20


def test_rewind_by_a_negative_count_is_refused():
    cache = ring(window=37, slack=20)
    feed(cache, 0, 9)
    with pytest.raises(RewindError, match="a count is 0 or more"):
        cache.rewind(-1)
    assert cache.offset == 9


def test_full_cache_refuses_to_rewind_further_than_it_was_fed():
    cache = KVCache(HEADS, DIM, 100)
    feed(cache, 0, 30)
    with pytest.raises(RewindError, match="only 30 were fed"):
        cache.rewind(31)
    cache.rewind(30)
    assert cache.offset == 0


@pytest.mark.parametrize("make", [lambda: KVCache(HEADS, DIM, 50), lambda: ring(7, 5, 50)])
def test_rows_past_max_context_are_refused_and_nothing_moves(make):
    cache = make()
    feed(cache, 0, 48)
    for refused in (lambda: cache.append(*numbered(48, 3)), lambda: cache.reserve(3)):
        with pytest.raises(ContextLengthError, match="max_context is 50"):
            refused()
    feed(cache, 48, 2)
    assert numbers(cache.rows(), 44) == list(range(44, 50))


def test_rows_of_another_shape_are_refused():
    cache = KVCache(HEADS, DIM, 50)
    k, v = numbered(0, 3)
    with pytest.raises(ShapeError, match="are needed"):
        cache.append(k, v.swapaxes(1, 2))
    assert cache.offset == 0


def test_continuing_a_rewound_wrapped_ring_equals_a_straight_run():
    window = 23
    rng = np.random.default_rng(5)
    k, v = (mx.array(rng.standard_normal((160, HEADS, DIM), dtype=np.float32)) for _ in range(2))
    q = mx.array(rng.standard_normal((1, 2 * HEADS, DIM), dtype=np.float32))
    straight, rewound = ring(window, 31), ring(window, 31)
    straight.append(k[:131], v[:131])
    rewound.append(k[:140], -v[:140])  # the end of it is another text
    rewound.rewind(29)
    rewound.append(k[111:131], v[111:131])
    straight_rows, rewound_rows = straight.rows(), rewound.rows()
    assert straight_rows.end == rewound_rows.end
    assert not mx.array_equal(
        attend_reference(q, straight_rows, 0.4, window),
        attend_reference(q, rewound_rows, 0.4, window),
    )
    rewound.append(k[131:151], v[131:151])
    straight.append(k[131:151], v[131:151])
    assert mx.array_equal(
        attend_reference(q, straight.rows(), 0.4, window),
        attend_reference(q, rewound.rows(), 0.4, window),
    )


def test_forks_that_write_in_place_do_not_meet_in_one_tail():
    one = KVCache(HEADS, DIM, 4096)
    write(one, 0, 9)
    other = one.fork()
    write(one, 100, 2)
    write(other, 200, 3)
    assert numbers(one.rows(), 0) == [*range(9), 100, 101]
    assert numbers(other.rows(), 0) == [*range(9), 200, 201, 202]


def test_rows_that_a_ring_overwrote_stay_lost_after_a_rewind():
    cache = ring(window=7, slack=6)
    feed(cache, 0, 300, 150)
    feed(cache, 300, 2)
    first = cache.rows().first
    cache.rewind(5)
    feed(cache, 1000, 1)
    feed(cache, 1001, 150)
    assert cache.rows().first == first == 300 - 13


def test_writing_in_place_leaves_the_rows_that_were_handed_in_alone():
    cache = KVCache(1, DIM, 4096)
    k = mx.zeros((TAIL_ROWS, 1, DIM))
    cache.append(k, k)
    cache.rewind(1)
    block, row = cache.reserve(1)
    np.asarray(block.k)[:, row] = 1
    assert mx.all(k == 0)


def write(cache, start, count):
    block, row = cache.reserve(count)
    for to, rows in zip((block.k, block.v), numbered(start, count), strict=True):
        np.asarray(to)[:, row : row + count] = np.array(rows).swapaxes(0, 1)
    cache.advance(count)


def test_fork_writes_what_the_original_does_not_see_and_the_reverse():
    original = KVCache(HEADS, DIM, 4096)
    feed(original, 0, 2 * TAIL_ROWS + 9, TAIL_ROWS)
    fork = original.fork()
    fork.rewind(TAIL_ROWS)
    feed(fork, 1000, 3 * TAIL_ROWS, TAIL_ROWS // 2)
    feed(original, 5000, 2 * TAIL_ROWS, 31)
    shared = TAIL_ROWS + 9
    assert numbers(original.rows(), 0) == [
        *range(2 * TAIL_ROWS + 9),
        *range(5000, 5000 + 2 * TAIL_ROWS),
    ]
    assert numbers(fork.rows(), 0) == [*range(shared), *range(1000, 1000 + 3 * TAIL_ROWS)]

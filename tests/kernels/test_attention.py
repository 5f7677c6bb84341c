import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_attention import (
    CASES,
    AttentionCase,
    Fixed,
    Inputs,
    in_double,
    inputs,
    laid_out,
)
from kernels.host_bodies import ISAS, host_kernels

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import KernelError, ShapeError
from turbospark.kernels.attention import attend_reference
from turbospark.protocols import Phase

BODIES = ["reference", *(f"{isa} {phase.value}" for isa in ISAS for phase in Phase)]
TOLERANCE = 4e-6  # values are around 1; sums of some hundred float32 products


def body_of(name, case: AttentionCase, sinks, threads=2):
    """A function (q, cache) -> [T, Hq * D]."""
    if name == "reference":
        return lambda q, cache: attend_reference(q, cache.rows(), case.scale, case.window, sinks)
    isa, phase = name.split()
    run = host_kernels(isa, threads).attend(case.heads, case.scale, case.window, sinks)
    return lambda q, cache: run(q, cache, Phase(phase))


def fed(body, case: AttentionCase, given: Inputs, chunk: int) -> np.ndarray:
    cache, out = case.cache(), []
    for at in range(0, case.tokens, chunk):
        part = slice(at, at + chunk)
        cache.append(given.k[part], given.v[part])
        out.append(np.array(body(given.q[part], cache)))
    return np.concatenate(out)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_a_softmax_in_double_at_any_chunk_size(case, name):
    given = inputs(case)
    body = body_of(name, case, given.sinks)
    whole = fed(body, case, given, case.tokens)
    np.testing.assert_allclose(whole, in_double(case, given), atol=TOLERANCE, rtol=0)
    for chunk in (1, 3, 7, 130):
        np.testing.assert_array_equal(fed(body, case, given, chunk), whole, err_msg=f"{chunk}")


@pytest.mark.parametrize("name", BODIES)
def test_window_holds_for_one_token_over_a_full_cache(name):
    case = AttentionCase("", 33, 3, 1, 24, window=4)
    given = inputs(case)
    body = body_of(name, case, None)
    cache = KVCache(1, 24, 64)
    cache.append(given.k, given.v)
    expected = in_double(case, given)[32:]
    np.testing.assert_allclose(np.array(body(given.q[32:], cache)), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", BODIES)
def test_chunks_of_five_with_a_window_of_seven_equal_one_pass(name):
    case = AttentionCase("", 43, 6, 2, 24, window=7, slack=4)
    given = inputs(case)
    body = body_of(name, case, None)
    np.testing.assert_array_equal(fed(body, case, given, 5), fed(body, case, given, 43))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("boundary", [0, 1, 63, 64, 130, 190, 200])
def test_where_rows_lie_changes_no_bit_and_unused_memory_is_never_read(boundary, name):
    case = AttentionCase("", 201, 6, 2, 40)
    given = inputs(case)
    body = body_of(name, case, None)
    whole = fed(body, case, given, 201)
    rows = laid_out(given, boundary, capacity=boundary + 9, tail_capacity=201 - boundary + 5)
    np.testing.assert_array_equal(np.array(body(given.q[190:], Fixed(rows))), whole[190:])


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(("boundary", "capacity"), [(201, 60), (195, 43), (170, 50)])
def test_ring_of_any_turn_changes_no_bit_and_unused_memory_is_never_read(boundary, capacity, name):
    case = AttentionCase("", 201, 4, 1, 24, window=32)
    given = inputs(case)
    body = body_of(name, case, None)
    whole = fed(body, case, given, 201)
    rows = laid_out(given, boundary, capacity, tail_capacity=50, first=boundary - capacity)
    np.testing.assert_array_equal(np.array(body(given.q[194:], Fixed(rows))), whole[194:])


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("isa", ISAS)
def test_number_of_threads_changes_no_bit(isa, phase):
    case = AttentionCase("", 301, 5, 1, 72, window=200, sinks=True)
    given = inputs(case)
    name = f"{isa} {phase.value}"
    alone = fed(body_of(name, case, given.sinks, threads=1), case, given, 77)
    for threads in (2, 3):
        body = body_of(name, case, given.sinks, threads)
        np.testing.assert_array_equal(fed(body, case, given, 77), alone)


@pytest.mark.parametrize("name", BODIES)
def test_scores_far_apart_neither_overflow_nor_vanish(name):
    case = AttentionCase("", 140, 2, 1, 24)
    given = inputs(case)
    given = Inputs(given.q * 40, given.k * 40, given.v, None)
    body = body_of(name, case, None)
    out = fed(body, case, given, 11)
    np.testing.assert_allclose(out, in_double(case, given), atol=1e-3)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("sink", [-90.0, 0.0, 60.0])
def test_sink_takes_its_share_and_adds_no_value(sink, name):
    case = AttentionCase("", 50, 2, 1, 24, sinks=True)
    given = inputs(case)
    given = Inputs(given.q, given.k, given.v, mx.array([sink, 0.5]))
    out = fed(body_of(name, case, given.sinks), case, given, 50)
    np.testing.assert_allclose(out, in_double(case, given), atol=TOLERANCE)


@pytest.mark.parametrize("name", BODIES)
def test_row_that_the_ring_has_dropped_is_missed_by_name(name):
    case = AttentionCase("", 200, 3, 1, 24, window=90)
    given = inputs(case)
    cache = RingCache(1, 24, 1000, 20, 5)
    for part in (slice(0, 150), slice(150, 199), slice(199, 200)):
        cache.append(given.k[part], given.v[part])
    with pytest.raises(ShapeError, match="position 110, but the cache holds none before 125"):
        body_of(name, case, None)(given.q[199:], cache)


@pytest.mark.parametrize("name", BODIES)
def test_queries_whose_own_rows_are_missing_are_refused(name):
    case = AttentionCase("", 5, 3, 1, 24)
    given, cache = inputs(case), case.cache()
    cache.append(given.k[:4], given.v[:4])
    with pytest.raises(ShapeError, match="append theirs first"):
        body_of(name, case, None)(given.q, cache)


@pytest.mark.parametrize("isa", ISAS)
def test_host_refuses_rows_that_are_not_float32(isa):
    case = AttentionCase("", 3, 3, 1, 24)
    given, cache = inputs(case), case.cache()
    cache.append(given.k.astype(mx.bfloat16), given.v.astype(mx.bfloat16))
    with pytest.raises(KernelError, match="float32"):
        body_of(f"{isa} decode", case, None)(given.q, cache)


def test_reference_keeps_the_dtype_and_computes_in_float32():
    case = AttentionCase("", 90, 6, 2, 40)
    given = inputs(case)
    rounded = Inputs(*(part.astype(mx.bfloat16) for part in (given.q, given.k, given.v)), None)
    cache = case.cache()
    cache.append(rounded.k, rounded.v)
    out = attend_reference(rounded.q, cache.rows(), case.scale)
    assert out.dtype == mx.bfloat16
    widened = Inputs(*(part.astype(mx.float32) for part in (rounded.q, rounded.k, rounded.v)), None)
    expected = in_double(case, widened)
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), expected, atol=2**-8, rtol=2**-8)

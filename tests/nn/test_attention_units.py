import mlx.core as mx
import numpy as np
import pytest
from kernels.host_bodies import ISAS, host_kernels

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import ShapeError
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm
from turbospark.nn.attention import Attend, HeadNormRope, RotatedAttention
from turbospark.nn.linear import RMSNorm
from turbospark.protocols import Phase

T = 7
HEADS = HeadGeometry(num_heads=6, num_kv_heads=2, head_dim=44)
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "whole": Rope.build("default", 1e4, 44),
    "neighbours": Rope.build("default", 1e4, 44, traditional=True),
    "partial": Rope.build("default", 1e4, 44, partial_rotary_factor=0.5),
    "proportional": Rope.build("proportional", 1e6, 44, partial_rotary_factor=0.25),
    "magnified": Rope.build("yarn", 1e4, 44, **YARN),
}


def rng_rows(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def norm_module(seed):
    norm = RMSNorm(HEADS.head_dim, eps=1e-6, offset=1.0)
    norm.weight = rng_rows(HEADS.head_dim, seed=seed).astype(mx.bfloat16)
    return norm


def unit(rope, norms=True, kernels=None):
    given = {"q_norm": norm_module(1), "k_norm": norm_module(2), "v_norm": Norm(None, 1e-5)}
    made = HeadNormRope(HEADS, rope, **(given if norms else {}))
    if kernels is not None:
        made.bind(kernels)
    return made


def inputs(count=T):
    D = HEADS.head_dim
    widths = (HEADS.num_heads * D, HEADS.num_kv_heads * D, HEADS.num_kv_heads * D)
    return [rng_rows(count, width, seed=seed) for seed, width in enumerate(widths, 5)]


def cache_rows(cache, begin):
    rows = cache.rows()
    assert rows.boundary <= begin
    part = slice(begin - rows.boundary, rows.end - rows.boundary)
    return np.array(rows.tail.k[:, part]), np.array(rows.tail.v[:, part])


def started(offset):
    cache = KVCache(HEADS.num_kv_heads, HEADS.head_dim, 400)
    if offset:
        shape = (offset, HEADS.num_kv_heads, HEADS.head_dim)
        cache.append(rng_rows(*shape), rng_rows(*shape))
    return cache


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("isa", ISAS)
def test_host_rotates_and_writes_what_the_reference_does(isa, name, norms):
    host, reference = unit(ROPES[name], norms, host_kernels(isa)), unit(ROPES[name], norms)
    assert (host.body, reference.body) == ("host", "reference")
    one, other = started(13), started(13)
    for phase in (Phase.PREFILL, Phase.DECODE):
        q = host(*inputs(), one, phase)
        assert q.shape == (T, HEADS.num_heads, HEADS.head_dim)
        expected = reference(*inputs(), other, phase)
        np.testing.assert_allclose(np.array(q), np.array(expected), atol=4e-6)
    assert one.offset == other.offset == 13 + 2 * T
    for got, wanted in zip(cache_rows(one, 0), cache_rows(other, 0), strict=True):
        np.testing.assert_allclose(got, wanted, atol=4e-6)


@pytest.mark.parametrize("isa", [None, *ISAS])
def test_rows_equal_one_row_bit_for_bit(isa):
    made = unit(ROPES["whole"], kernels=host_kernels(isa) if isa else None)
    together, apart = started(13), started(13)
    given = inputs()
    q = made(*given, together, Phase.DECODE)
    for t in range(T):
        one = made(*(x[t : t + 1] for x in given), apart, Phase.DECODE)
        assert mx.array_equal(one[0], q[t])
    for got, wanted in zip(cache_rows(apart, 0), cache_rows(together, 0), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("isa", [None, *ISAS])
def test_layer_that_shares_rows_rotates_at_the_positions_just_written(isa):
    made = unit(ROPES["whole"], kernels=host_kernels(isa) if isa else None)
    cache = started(13)
    q, k, v = inputs()
    expected = made(q, k, v, cache, Phase.PREFILL)
    shared = made(q, None, None, cache, Phase.PREFILL)
    assert cache.offset == 13 + T
    assert mx.array_equal(shared, expected)


@pytest.mark.parametrize("isa", [None, *ISAS])
@pytest.mark.parametrize("gate_width", [0, 1, 44])
def test_rotated_attention_is_one_unit_after_the_other_and_the_gate(gate_width, isa):
    norms = {"q_norm": norm_module(1), "k_norm": norm_module(2), "v_norm": Norm(None, 1e-5)}
    whole = RotatedAttention(HEADS, ROPES["partial"], scale=0.2, window=9, **norms)
    rotate = HeadNormRope(HEADS, ROPES["partial"], **norms)
    attend = Attend(HEADS, scale=0.2, window=9)
    for made in (whole, rotate, attend) if isa else ():
        made.bind(host_kernels(isa))
    assert whole.body == attend.body
    q, k, v = inputs()
    gate = rng_rows(T, 6 * gate_width, seed=9) if gate_width else None
    found = whole(q, k, v, started(13), Phase.DECODE, gate)
    cache = started(13)
    wanted = np.array(attend(rotate(q, k, v, cache, Phase.DECODE), cache, Phase.DECODE))
    if gate is not None:
        opening = 1 / (1 + np.exp(-np.array(gate).reshape(T, 6, -1)))
        wanted = (wanted.reshape(T, 6, 44) * opening).reshape(T, -1)
    np.testing.assert_allclose(np.array(found), wanted, atol=2e-6)
    again = whole.reference(q, k, v, started(13), Phase.DECODE, gate)
    np.testing.assert_allclose(np.array(again), wanted, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_prompt_long_enough_for_all_threads_equals_one_thread(isa):
    together, alone = started(0), started(0)
    made = unit(ROPES["whole"], kernels=host_kernels(isa, 2))
    single = unit(ROPES["whole"], kernels=host_kernels(isa, 1))
    given = inputs(150)
    expected = single(*given, alone, Phase.PREFILL)
    assert mx.array_equal(made(*given, together, Phase.PREFILL), expected)
    for got, wanted in zip(cache_rows(together, 0), cache_rows(alone, 0), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("isa", ISAS)
def test_host_writes_leave_a_fork_alone(isa):
    made = unit(ROPES["whole"], kernels=host_kernels(isa))
    cache = started(13)
    made(*inputs(), cache, Phase.PREFILL)
    fork = cache.fork()
    before = cache_rows(cache, 0)
    fork.rewind(T)
    made(*(-x for x in inputs()), fork, Phase.PREFILL)
    for now, then in zip(cache_rows(cache, 0), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert np.any(cache_rows(fork, 0)[0] != before[0])


@pytest.mark.parametrize("isa", [None, *ISAS])
@pytest.mark.parametrize("phase", Phase)
def test_rewinding_and_feeding_again_equals_a_straight_run(phase, isa):
    kernels = host_kernels(isa) if isa else ReferenceKernels()
    rotate = unit(ROPES["whole"], kernels=kernels)
    attend = Attend(HEADS, scale=0.2, window=29)
    attend.bind(kernels)
    given = inputs(190)
    caches = [
        RingCache(HEADS.num_kv_heads, HEADS.head_dim, 400, window=29, slack=23) for _ in range(2)
    ]

    def feed(cache, begin, end):
        q = rotate(*(x[begin:end] for x in given), cache, phase)
        return np.array(attend(q, cache, phase))

    for begin in range(0, 180, 20):
        feed(caches[0], begin, begin + 20)
        feed(caches[1], begin, begin + 20)
    caches[1].rewind(23)
    feed(caches[1], 157, 158)
    feed(caches[1], 158, 180)
    np.testing.assert_array_equal(feed(caches[1], 180, 190), feed(caches[0], 180, 190))


@pytest.mark.parametrize("isa", ISAS)
def test_host_refuses_inputs_of_another_width(isa):
    made = unit(ROPES["whole"], kernels=host_kernels(isa))
    cache = started(0)
    q, k, v = inputs()
    for wrong in ((q[:, 1:], k, v), (q, k[:, 1:], v), (q, k, v[:, 1:])):
        with pytest.raises(ShapeError, match="takes"):
            made(*wrong, cache, Phase.DECODE)
    assert cache.offset == 0
    with pytest.raises(ShapeError, match="pairs of 44 given for heads of 46"):
        HeadNormRope(HeadGeometry(6, 2, 46), ROPES["whole"]).bind(host_kernels(isa))
    attend = Attend(HEADS, scale=0.2)
    attend.bind(host_kernels(isa))
    with pytest.raises(ShapeError, match=r"takes \[T, 6, 44\]"):
        attend(q, cache, Phase.DECODE)

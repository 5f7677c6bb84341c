"""Latent attention against keys and values that are written out for every head."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import kernel_sets

from turbospark.caches.latent import LatentCache
from turbospark.caches.step import StepCache
from turbospark.errors import CheckpointError
from turbospark.kernels.kv_rows import StepRows
from turbospark.kernels.latent import LatentGeometry
from turbospark.kernels.quantized_matmul import dequantize_reference, heads_matmul_reference
from turbospark.kernels.rope import Rope, rotation_table
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.latent import LatentAttention, head_halves
from turbospark.nn.latent_weights import latent_weights
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.protocols import Phase

SIZES = LatentGeometry(num_heads=5, latent_dim=64, rope_dim=6, key_dim=11, value_dim=9)
ROPE = Rope.build("default", 100.0, 6, traditional=True)
SCALE, EPS = 0.3, 1e-6
LAYOUTS = [None, (4, 64), (8, 32), (3, 16)]


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight_of(layout, rows=SIZES.expanded, columns=64):
    dense = mx.array(drawn(rows, columns, seed=1)) / 8
    if layout is None:
        return dense
    bits, group = layout
    if group > 16:
        return QuantizedWeight(*mx.quantize(dense, group, bits), bits, group)
    codes = mx.array(np.random.default_rng(2).integers(0, 2**32, (rows, columns * bits // 32)))
    scales = mx.array(drawn(rows, columns // group, seed=3)) / 30
    return QuantizedWeight(codes.astype(mx.uint32), scales, -3 * scales, bits, group)


def unit_of(layout=None):
    norm, expand = RMSNorm(64, EPS), Linear(64, SIZES.expanded)
    norm.weight = mx.array(1 + 0.3 * drawn(64, seed=4))
    expand.assign(weight_of(layout))
    return LatentAttention(SIZES, ROPE, norm=norm, expand=expand, scale=SCALE)


def inputs(count):
    """Queries [n, H * (N + R)] and rows [n, L + R]."""
    return drawn(count, 5 * 17, seed=5), drawn(count, 70, seed=6)


def turned(x, positions):
    """Neighbours of the last axis as complex numbers, turned."""
    cos, sin = rotation_table(ROPE.inv_freq, 1.0, 0, positions)
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    pairs = pairs * (cos + 1j * sin).reshape(positions, *(1,) * (x.ndim - 2), -1)
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def expanded(unit, q, rows):
    """The same attention with every head's keys and values written out, in float64."""
    n = len(rows)
    q, rows = q.astype(np.float64).reshape(n, 5, 17), rows.astype(np.float64)
    latent = rows[:, :64] / np.sqrt((rows[:, :64] ** 2).mean(-1, keepdims=True) + EPS)
    latent = latent * np.array(unit._norm.weight, np.float64)
    matrix = np.array(dequantize_reference(unit._expand.value), np.float64).reshape(5, 20, 64)
    both = np.einsum("nl,hol->nho", latent, matrix)
    shared = np.repeat(turned(rows[:, None, 64:], n), 5, axis=1)
    k = np.concatenate([both[..., :11], shared], -1)
    q = np.concatenate([q[..., :11], turned(q[..., 11:], n)], -1)
    scores = np.einsum("qhd,khd->hqk", q, k) * SCALE
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hqk,khv->qhv", shares, both[..., 11:]).reshape(n, -1)


def run(unit, q, rows, sizes, phase=Phase.DECODE, cache=None):
    cache = cache or LatentCache(64, 6, 512)
    out, at = [], 0
    for size in sizes:
        part = slice(at, at + size)
        out.append(np.array(unit(mx.array(q[part]), mx.array(rows[part]), cache, phase)))
        at += size
    return np.concatenate(out)


@pytest.fixture(params=sorted(kernel_sets()))
def kernels(request):
    return kernel_sets()[request.param]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_attention_over_expanded_keys_and_values(layout, kernels):
    unit, (q, rows) = unit_of(layout), inputs(37)
    unit.bind(kernels)
    assert unit.body == kernels.name
    assert np.abs(run(unit, q, rows, [37]) - expanded(unit, q, rows)).max() < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", list(Phase))
def test_rows_do_not_depend_on_how_they_are_fed(layout, phase, kernels):
    unit, (q, rows) = unit_of(layout), inputs(200)
    unit.bind(kernels)
    whole = run(unit, q, rows, [200], phase)
    for sizes in ([1] * 20 + [180], [7] * 28 + [4], [127, 2, 71]):
        assert np.array_equal(run(unit, q, rows, sizes, phase), whole)


@pytest.mark.parametrize("start", [1, 120, 127, 128, 131, 300])
def test_a_step_whose_positions_are_arrays_equals_an_eager_one(start):
    unit, (q, rows) = unit_of((4, 64)), inputs(start + 3)
    caches = [LatentCache(64, 6, 512) for _ in range(2)]
    for cache in caches:
        run(unit, q[:start], rows[:start], [start], cache=cache)
    sealed, tail, boundary = caches[0].step_blocks(3)
    step = StepCache(StepRows(sealed, tail, mx.array([boundary, start], mx.int32)))
    got = run(unit, q[start:], rows[start:], [3], cache=step)
    wanted = run(unit, q[start:], rows[start:], [3], cache=caches[1])
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    caches[0].take_tail(step.rows().tail, 3)
    ours, theirs = (cache.export() for cache in caches)
    for name in ("k", "v"):
        np.testing.assert_allclose(np.array(ours[name]), np.array(theirs[name]), atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_hold_the_codes_of_the_whole(layout):
    weight = weight_of(layout)
    whole = np.array(dequantize_reference(weight)).reshape(5, 20, 64)
    keys, values = head_halves(weight, SIZES)
    assert np.array_equal(np.array(dequantize_reference(keys)), whole[:, :11])
    assert np.array_equal(np.array(dequantize_reference(values)), whole[:, 11:])
    if layout is not None:
        assert (keys.bits, keys.group_size, keys.codes.dtype) == (*layout, mx.uint32)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_head_is_multiplied_by_its_own_matrix(layout, transpose):
    keys, _ = head_halves(weight_of(layout), SIZES)
    dense = np.array(dequantize_reference(keys), np.float64)
    x = drawn(13, 5, 64 if transpose else 11)
    wanted = np.einsum("thl,hnl->thn" if transpose else "thn,hnl->thl", x, dense)
    got = np.array(heads_matmul_reference(mx.array(x), keys, transpose=transpose))
    assert np.abs(got - wanted).max() < 1e-5


def split(whole):
    """MLX's two matrices of the heads, from [H * (N + V), L]."""
    heads = mx.reshape(whole, (SIZES.num_heads, -1, 64))
    return heads[:, : SIZES.key_dim].swapaxes(1, 2), heads[:, SIZES.key_dim :]


def named(keys, values):
    stem = "model.layers.2.self_attn"
    return {f"{stem}.embed_q.weight": keys, f"{stem}.unembed_out.weight": values, "other": keys}


def test_two_matrices_become_one():
    whole = weight_of(None)
    found = latent_weights(named(*split(whole)), SIZES)
    assert found.keys() == {"model.layers.2.self_attn.kv_b_proj.weight", "other"}
    assert np.array_equal(found["model.layers.2.self_attn.kv_b_proj.weight"], whole)
    assert latent_weights(found, SIZES) == found


@pytest.mark.parametrize("name", ["embed_q", "unembed_out"])
def test_half_a_pair_stays_for_the_loader_to_report(name):
    weights = named(*split(weight_of(None)))
    del weights[f"model.layers.2.self_attn.{name}.weight"]
    assert latent_weights(weights, SIZES) == weights


def test_matrices_of_another_shape_are_named():
    keys, values = split(weight_of(None))
    with pytest.raises(CheckpointError, match=r"embed_q\.weight' is \(5, 11, 64\) where"):
        latent_weights(named(keys.swapaxes(1, 2), values), SIZES)
    with pytest.raises(CheckpointError, match=r"unembed_out\.weight' is \(5, 8, 64\) where"):
        latent_weights(named(keys, values[:, :8]), SIZES)


@pytest.mark.parametrize("assumed", [(4, 32), (2, 64), (8, 16)])
def test_bits_of_a_pair_come_from_its_shapes(assumed):
    sizes = LatentGeometry(5, 64, 6, 32, 9)
    keys = QuantizedWeight(*mx.quantize(mx.array(drawn(5, 64, 32)), 32, 4), 4, 32)
    values = QuantizedWeight(*mx.quantize(mx.array(drawn(5, 9, 64)), 32, 4), 4, 32)
    wrong = [QuantizedWeight(w.codes, w.scales, w.biases, *assumed) for w in (keys, values)]
    found, wanted = (latent_weights(named(*pair), sizes) for pair in ((keys, values), wrong))
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    assert found[name].shape == (5 * 41, 64)
    assert np.array_equal(found[name], wanted[name])

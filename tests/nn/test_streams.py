"""Residual streams and n-grams' gates against their formulas in float64."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import kernel_sets
from kernels.cases_gpu import EMULATION
from metal_emu import require_emulator

from turbospark.kernels.gpu.target import GpuKernels
from turbospark.kernels.streams import grouped_norm_reference, inject_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.delta_net import Filter
from turbospark.nn.linear import RMSNorm
from turbospark.nn.ngram import NgramGate, NgramRows
from turbospark.nn.streams import StreamMixer
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

G, C, RANK, T, EPS = 3, 10, 7, 5, 1e-3
KERNELS = kernel_sets()


def draw(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def norm_of(seed):
    norm = RMSNorm(G * C, EPS)
    norm.weight = mx.array((1 + draw(G * C, seed=seed) / 4).astype(np.float32))
    return norm


def grouped(x, norm):
    parts = x.reshape(-1, G, C)
    normed = parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + EPS)
    return normed.reshape(x.shape) * np.array(norm.weight, np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def as_float(x):
    return mx.array(x.astype(np.float32))


def test_every_stream_is_normalised_by_itself():
    norm, x = norm_of(2), draw(T, G * C)
    x[:, :C] *= 30
    got = np.array(grouped_norm_reference(as_float(x), norm.value, G))
    np.testing.assert_allclose(got, grouped(x, norm), atol=1e-5)


@pytest.mark.parametrize("kernels", sorted(KERNELS))
@pytest.mark.parametrize("phase", list(Phase))
def test_a_mixture_equals_its_formula(kernels, phase):
    mixer = StreamMixer(C, G, RANK, EPS, injects=True)
    mixer.hc_norm.weight = norm_of(2).weight
    matrices = {
        "input_mix_weight_down": draw(RANK, G * C, seed=3),
        "input_mix_weight_up": draw(G * C, RANK, seed=4),
        "block_inject_weight": draw(G, G * C, seed=5),
    }
    for name, value in matrices.items():
        getattr(mixer, name).weight = as_float(value)
    bind_units(mixer, KERNELS[kernels])
    assert mixer.mix.body == kernels
    h = draw(T, G * C)
    down, up, inject = matrices.values()

    def wanted(h):
        n = grouped(h, mixer.hc_norm)
        low = n @ down.T / G
        shares = sigmoid(low * sigmoid(low) @ up.T)
        return (shares * n).reshape(T, G, C).mean(axis=1), 2 * sigmoid(n @ inject.T / G)

    same, *got = mixer(as_float(h), phase)
    assert np.array_equal(same, as_float(h))
    for one, other in zip(got, wanted(h), strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=1e-5)
    y, taken = draw(T, C, seed=6), draw(T, G, seed=7)
    more = (h.reshape(T, G, C) + taken[..., None] * y[:, None]).reshape(T, -1)
    after, *got = mixer(as_float(h), phase, (as_float(y), as_float(taken)))
    np.testing.assert_allclose(np.array(after), more, atol=1e-5)
    for one, other in zip(got, wanted(more), strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=1e-5)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_mixture_on_the_host_does_not_depend_on_neighbours(phase):
    if "host" not in KERNELS:
        pytest.skip("no compiler here")
    mixer = StreamMixer(300, G, 20, EPS, injects=True)
    for name, shape in (
        ("input_mix_weight_down", (20, 900)),
        ("input_mix_weight_up", (900, 20)),
        ("block_inject_weight", (G, 900)),
    ):
        getattr(mixer, name).weight = as_float(draw(*shape) / 30)
    bind_units(mixer, KERNELS["host"])
    h, said = as_float(draw(9, 900)), (as_float(draw(9, 300)), as_float(draw(9, G)))
    whole = mixer(h, phase, said)
    for start, end in ((0, 1), (2, 7), (8, 9)):
        part = mixer(h[start:end], phase, tuple(x[start:end] for x in said))
        for one, other in zip(part, whole, strict=True):
            assert np.array_equal(one, other[start:end])


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("injects", [True, False])
def test_a_mixture_of_a_gpu_equals_the_reference(phase, injects):
    require_emulator()
    mixer = StreamMixer(64, G, 32, EPS, injects=injects)
    mixer.hc_norm.weight = as_float(1 + draw(G * 64) / 4)
    for name, shape, bits in (
        ("input_mix_weight_down", (32, G * 64), 4),
        ("input_mix_weight_up", (G * 64, 32), 4),
        ("block_inject_weight", (G, G * 64), 8),
    ):
        if injects or name != "block_inject_weight":
            codes = mx.quantize(as_float(draw(*shape) / 9), group_size=32, bits=bits)
            getattr(mixer, name).assign(QuantizedWeight(*codes, bits, 32))
    given = as_float(draw(T, G * 64)), phase
    said = (as_float(draw(T, 64, seed=8)), as_float(draw(T, G, seed=9))) if injects else None
    bind_units(mixer, KERNELS["reference"])
    wanted = mixer.mix(*given, said)
    bind_units(mixer, GpuKernels(EMULATION, KernelPolicy()))
    assert mixer.mix.body == "emulation"
    for one, other in zip(mixer.mix(*given, said), wanted, strict=True):
        if one is None:
            assert not injects
            continue
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-4)


def test_an_output_is_added_to_the_streams_as_they_were():
    h, y, shares = draw(T, G * C), draw(T, C, seed=2), draw(T, G, seed=3)
    got = np.array(inject_reference(as_float(h), as_float(y), as_float(shares)))
    wanted = h.reshape(T, G, C) + shares[..., None] * y[:, None]
    np.testing.assert_allclose(got, wanted.reshape(T, -1), atol=1e-5)


@pytest.mark.parametrize(("taps", "dilation"), [(4, 3), (2, 1), (3, 4)])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_values_of_ngrams_equal_their_formula(taps, dilation, rows):
    norms = tuple(norm_of(seed) for seed in (2, 3, 4))
    conv = Filter(G * C, taps)
    weight = draw(G * C, taps, seed=5)
    conv.weight = as_float(weight[..., None])
    gate = NgramGate(norms, conv, dilation, G)
    key, value, h = draw(rows, G * C), draw(rows, C, seed=6), draw(rows, G * C, seed=7)
    tail = draw((taps - 1) * dilation, G * C, seed=8)
    got, seen = gate(*(as_float(x) for x in (key, value, h, tail)))
    pairs = (grouped(key, norms[0]) * grouped(h, norms[1])).reshape(rows, G, C)
    fit = pairs.sum(axis=-1) / C**0.5
    fit = np.sign(fit) * np.sqrt(np.maximum(np.abs(fit), 1e-6))
    gated = (sigmoid(fit)[..., None] * value[:, None]).reshape(rows, -1)
    normed = grouped(gated, norms[2])
    history = np.concatenate([tail, normed])
    total = sum(history[t * dilation : t * dilation + rows] * weight[:, t] for t in range(taps))
    np.testing.assert_allclose(np.array(seen), normed, atol=1e-5)
    np.testing.assert_allclose(np.array(got), gated + total * sigmoid(total), atol=2e-5)


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 12])
def test_a_replay_keeps_the_last_rows_of_those_kept(keep):
    tail, before = as_float(draw(9, 6)), mx.array([7, 8], mx.int32)
    normed, tokens = as_float(draw(12, 6, seed=2)), mx.arange(20, 32, dtype=mx.int32)
    rows = NgramRows((tail, before), normed, tokens)
    kept, last = rows.replay(keep)
    assert np.array_equal(kept, np.concatenate([tail, normed[:keep]])[-9:])
    assert np.array(last).tolist() == [7, 8, *range(20, 20 + keep)][-2:]
    again = rows.like(rows.arrays())
    assert all(map(np.array_equal, again.replay(keep), (kept, last)))

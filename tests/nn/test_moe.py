"""Routed experts against a loop over rows and experts in numpy float64."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.kernels.experts import expert_matmul_reference, route_reference
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.moe import (
    Closing,
    Experts,
    PlainRouter,
    RoutedExperts,
    Router,
    SharedExpert,
)
from turbospark.protocols import Phase

E, K, C, INNER, T = 7, 3, 64, 96, 5


def random(*shape, scale=1.0):
    return mx.array(np.random.default_rng(sum(shape)).normal(size=shape) * scale, mx.float32)


def build(quantized: bool):
    router = Router(E, RMSNorm(C, 1e-6), expert_scale=True)
    router.norm.weight = 1 + random(C, scale=0.3)
    router.per_expert_scale = 1 + random(E, scale=0.3)
    experts = Experts(E, C, INNER)
    router.proj.assign(random(E, C, scale=0.5))
    for module in (experts.gate_proj, experts.up_proj, experts.down_proj):
        weight = random(*module.value.shape, scale=0.2)
        if quantized:
            module.assign(QuantizedWeight(*mx.quantize(weight, 32, 4), bits=4, group_size=32))
        else:
            module.assign(weight)
    norm, post = RMSNorm(C, 1e-6), RMSNorm(C, 1e-6)
    norm.weight, post.weight = 1 + random(C, scale=0.2), 1 + random(C, scale=0.1)
    options = {"top_k": K, "activation": "silu", "norm": norm}
    unit = RoutedExperts(router, experts, **options, closing=Closing(post))
    return router, experts, norm, post, unit


def expected(router, experts, norm, post, h):
    def rms(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.array(weight, np.float64)

    def values(module):
        return np.array(dequantize_reference(module.value), np.float64)

    gate, up, down = (
        values(module) for module in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    rows = []
    for row in np.array(h, np.float64):
        scores = values(router.proj) @ rms(row, router.norm.weight)
        chosen = np.argsort(-scores, kind="stable")[:K]
        shares = np.exp(scores[chosen] - scores[chosen].max())
        shares = shares / shares.sum() * np.array(router.per_expert_scale, np.float64)[chosen]
        y, total = rms(row, norm.weight), 0.0
        for expert, share in zip(chosen, shares, strict=True):
            hidden = gate[expert] @ y
            hidden = hidden / (1 + np.exp(-hidden)) * (up[expert] @ y)
            total = total + share * (down[expert] @ hidden)
        rows.append(rms(total, post.weight))
    return np.array(rows)


@pytest.mark.parametrize("quantized", [False, True])
def test_routed_experts_equal_a_loop(quantized):
    router, experts, norm, post, unit = build(quantized)
    unit.bind(ReferenceKernels())
    h = random(T, C)
    np.testing.assert_allclose(
        np.array(unit(h, Phase.DECODE)), expected(router, experts, norm, post, h), atol=2e-5
    )


def test_a_shared_expert_is_added_to_every_row_by_its_own_gate():
    _, experts, norm, _, _ = build(quantized=False)
    proj, gate = Linear(C, E), Linear(C, 1)
    proj.assign(random(E, C, scale=0.5))
    gate.assign(random(1, C, scale=0.3))
    mlp = MLP(C, INNER + 8, norm, activation="silu", residual=False)
    for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        module.assign(random(*module.value.shape, scale=0.2))
    router, h = PlainRouter(norm, proj), random(T, C)
    options = {"top_k": K, "activation": "silu", "norm": norm}
    alone = RoutedExperts(router, experts, **options)
    both = RoutedExperts(router, experts, **options, shared=SharedExpert(mlp, gate))
    y = np.array(h, np.float64)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * np.array(norm.weight)
    share = 1 / (1 + np.exp(-y @ np.array(gate.value, np.float64).T))
    added = np.array(both(h, Phase.DECODE)) - np.array(alone(h, Phase.DECODE))
    np.testing.assert_allclose(added, share * np.array(mlp(h, Phase.DECODE)), atol=2e-5)


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit on a CPU; a GPU picks its order of summing by the number of rows."""
    tolerance = 0.0 if mx.default_device() == mx.cpu else 2e-5
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("quantized", [False, True])
def test_rows_do_not_depend_on_their_neighbours(quantized):
    *_, unit = build(quantized)
    h = random(T, C)
    together = np.array(unit(h, Phase.PREFILL))
    apart = [np.array(unit(h[i : i + 1], Phase.PREFILL))[0] for i in range(T)]
    assert_same(together, np.array(apart))


def test_of_equal_scores_the_lower_expert_ranks_first():
    scores = mx.array([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], [2.0] * 6])
    ids, weights = route_reference(scores, 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert weights.sum(axis=-1).tolist() == pytest.approx([1.0, 1.0])


def test_expert_scales_come_after_the_weights_sum_to_one():
    scale = mx.array([2.0, 10.0, 0.5])
    _, weights = route_reference(mx.array([[0.0, 5.0, 0.0]]), 2, scale)
    share = 1 / (1 + np.exp(-5.0))
    np.testing.assert_allclose(np.array(weights)[0], [10 * share, 2 * (1 - share)], rtol=1e-5)


def test_permuted_experts_give_the_same_bytes():
    router, experts, *_, unit = build(quantized=True)
    h = random(T, C)
    before = np.array(unit(h, Phase.DECODE))
    order = mx.array([3, 0, 6, 2, 5, 1, 4])
    for module in (experts.gate_proj, experts.up_proj, experts.down_proj):
        w = module.value
        module.assign(
            QuantizedWeight(w.codes[order], w.scales[order], w.biases[order], w.bits, w.group_size)
        )
    router.proj.assign(router.proj.value[order])
    router.per_expert_scale = router.per_expert_scale[order]
    assert_same(np.array(unit(h, Phase.DECODE)), before)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (6, 16)])
@pytest.mark.parametrize("zero", [None, 3])
def test_every_layout_multiplies_by_what_it_stands_for(bits, group_size, zero):
    words, groups = C * bits // 32, C // group_size
    rng = np.random.default_rng(bits)
    codes = mx.array(rng.integers(0, 2**32, size=(E, 9, words), dtype=np.uint32))
    scales, biases = random(E, 9, groups, scale=0.1), random(E, 9, groups)
    w = QuantizedWeight(
        codes, scales, biases if zero is None else None, bits, group_size, zero=zero
    )
    ids = mx.array([[0, 6], [3, 3], [5, 1], [2, 4]])
    x = random(4, 1, 1, C)
    got = np.array(expert_matmul_reference(x, w, ids))
    dense = np.array(dequantize_reference(w), np.float64)
    for row in range(4):
        for rank in range(2):
            wanted = dense[ids[row, rank].item()] @ np.array(x[row, 0, 0], np.float64)
            np.testing.assert_allclose(got[row, rank, 0], wanted, rtol=1e-4, atol=1e-3)

"""Routed experts in C++ against the same in MLX operations."""

import functools

import mlx.core as mx
import numpy as np
import pytest
from kernels.matrices import quantized, relative_error, rows

from turbospark.errors import ShapeError
from turbospark.kernels.experts import mix_experts_reference, route_reference
from turbospark.kernels.host.target import HostKernels
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import ClampedSwiGLU, ExpertWeights, Norm, QuantizedWeight
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

PHASES = [Phase.DECODE, Phase.PREFILL]
TOLERANCES = {"exact": 3e-5, "pair": 4e-3}
E, K, C, INNER, T = 7, 3, 96, 160, 41  # in prefill some expert has more rows than a tile holds
CLAMPED = ClampedSwiGLU(1.3, 0.8)


@functools.cache
def host(mode, threads=2):
    return HostKernels(KernelPolicy(activations=mode, threads=threads))


def stack(N, columns, kind, seed):
    """Matrices [E, N, columns]: floats, bfloat16, MXFP4, or a number of bits in groups of 32."""
    dense = rows(E * N, columns, seed=seed).reshape(E, N, columns) * 0.2
    if kind == "mxfp4":
        packed = mx.quantize(dense * 2.0 ** -(seed % 3), 32, 4, mode="mxfp4")
        return QuantizedWeight(*packed, None, 4, 32, mode="mxfp4")
    if kind in ("float", "bfloat16"):
        return dense.astype(mx.bfloat16) if kind == "bfloat16" else dense
    parts = [quantized(N, columns, kind, 32, seed=seed + e, zero=kind == 5)[0] for e in range(E)]
    biases = None if kind == 5 else mx.stack([part.biases for part in parts])
    return QuantizedWeight(
        mx.stack([part.codes for part in parts]),
        mx.stack([part.scales for part in parts]),
        biases, kind, 32, zero=parts[0].zero,
    )  # fmt: skip


def experts_of(kinds, activation="silu", *, biased=False, **options):
    biases = (None, None, None)
    if biased:
        biases = tuple(rows(E, n, seed=50 + n + i) for i, n in enumerate((INNER, INNER, C)))
    return ExpertWeights(
        stack(INNER, C, kinds[0], 10), stack(INNER, C, kinds[1], 20), stack(C, INNER, kinds[2], 30),
        activation, K, biases, **options,
    )  # fmt: skip


NORM = Norm(rows(1, C, seed=1)[0], 1e-5)
H, SCORES = rows(T, C, seed=2), rows(T, E, seed=3)
SHARED = (rows(T, C, seed=4), rows(T, 1, seed=5))


def expected(experts, shared=None, norm=NORM):
    ids, weights = route_reference(
        SCORES, experts.top_k, experts.scale, renormalise=experts.renormalise
    )
    out = mix_experts_reference(rms_norm_reference(H, norm), ids, weights, experts)
    return out if shared is None else out + mx.sigmoid(shared[1]) * shared[0]


def agrees(experts, phase, mode, shared=None, norm=NORM):
    run = host(mode).routed_experts(norm, experts)
    got = run(H, SCORES, shared, phase)
    wanted = np.array(expected(experts, shared, norm)).astype(np.float64)
    assert got.shape == wanted.shape
    assert relative_error(got, wanted) < TOLERANCES[mode]
    for first, last in ((0, 1), (40, 41), (3, 21)):
        part = slice(first, last)
        own = None if shared is None else (shared[0][part], shared[1][part])
        assert mx.array_equal(run(H[part], SCORES[part], own, phase), got[part])


LAYOUTS = [
    (4, 4, 4), (5, 8, 6), ("float", "float", "float"), ("bfloat16", 4, "float"), ("mxfp4",) * 3,
]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["exact", "pair"])
@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_experts_of_every_layout(kinds, mode, phase):
    agrees(experts_of(kinds), phase, mode)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["exact", "pair"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf", CLAMPED], ids=str)
def test_biased_experts_with_every_activation(activation, mode, phase):
    agrees(experts_of((4, 8, 4), activation, biased=True), phase, mode)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_of_a_row_and_factors_of_experts(renormalise, phase):
    scale = mx.abs(rows(1, E, seed=6)[0]) + 0.5
    experts = experts_of(("float",) * 3, renormalise=renormalise, scale=scale)
    agrees(experts, phase, "exact")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["exact", "pair"])
def test_a_shared_expert_joins_by_its_gate(mode, phase):
    agrees(experts_of((4, 4, 4)), phase, mode, SHARED)


@pytest.mark.parametrize("phase", PHASES)
def test_one_expert_and_all_experts_a_row(phase):
    for top_k in (1, E):
        weights = experts_of(("float",) * 3)
        experts = ExpertWeights(weights.gate, weights.up, weights.down, "silu", top_k)
        agrees(experts, phase, "exact")


@pytest.mark.parametrize("phase", PHASES)
def test_a_norm_without_weight(phase):
    agrees(experts_of((4, 4, 4)), phase, "exact", norm=Norm(None, 1e-3))


@pytest.mark.parametrize("phase", PHASES)
def test_of_equal_scores_the_lower_expert_ranks_first(phase):
    run = host("exact").routed_experts(NORM, experts_of(("float",) * 3))
    scores = mx.array([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0, 3.0]])
    raised = scores + mx.array([[0.0, 2e-6, 1e-6, 0.0, 5e-7, 0.0, 0.0]])
    got, wanted = (run(H[:1], given, None, phase) for given in (scores, raised))
    np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-4)


@pytest.mark.parametrize("phase", PHASES)
def test_the_number_of_threads_changes_no_bit(phase):
    runs = [
        host("pair", threads).routed_experts(NORM, experts_of((4, 4, 4)))(H, SCORES, None, phase)
        for threads in (1, 2, 5)
    ]
    assert mx.array_equal(runs[0], runs[1])
    assert mx.array_equal(runs[0], runs[2])


@pytest.mark.parametrize("phase", PHASES)
def test_scores_that_are_not_numbers_give_a_row_that_is_none(phase):
    run = host("exact").routed_experts(NORM, experts_of(("float",) * 3))
    scores = mx.concatenate([mx.full((1, E), mx.nan), SCORES[1:3]])
    got = run(H[:3], scores, None, phase)
    assert np.isnan(np.array(got[0])).all()
    assert mx.array_equal(got[1:], run(H[1:3], SCORES[1:3], None, phase))


def test_what_is_not_implemented_is_left_to_mlx():
    group = stack(INNER, C, 4, 10)
    experts = ExpertWeights(group.codes, group, stack(C, INNER, 4, 30), "silu", K)
    assert host("exact").routed_experts(NORM, experts) is None


def test_rows_that_do_not_belong_together_are_refused():
    run = host("exact").routed_experts(NORM, experts_of(("float",) * 3))
    with pytest.raises(ShapeError, match=r"an expert takes \[T, 96\]"):
        run(H[:, :90], SCORES, None, Phase.DECODE)
    with pytest.raises(ShapeError, match=r"a choice of experts takes \[T, 7\]"):
        run(H, SCORES[:, :6], None, Phase.DECODE)
    with pytest.raises(ShapeError, match="as many rows of everything as of h, which has 41"):
        run(H, SCORES[:5], None, Phase.DECODE)
    with pytest.raises(ShapeError, match=r"a shared expert's gate takes \[T, 1\]"):
        run(H, SCORES, (SHARED[0], SCORES), Phase.DECODE)

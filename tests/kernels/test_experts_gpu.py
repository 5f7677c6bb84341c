"""Layers of routed experts on GPUs against loops over rows and experts in float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import BACKWARDS, EMULATION, TARGETS, mutated, resolve
from kernels.cases_gpu_delta import BOUNDS, largest_error
from kernels.cases_gpu_experts import CASES, EPS, ROUTES, ExpertCase
from kernels.matrices import rows
from metal_emu import MetalRunError, require_emulator

from turbospark.errors import ShapeError
from turbospark.kernels.experts import (
    keep_groups_reference,
    route_reference,
)
from turbospark.kernels.gpu import experts_mix as experts_module
from turbospark.kernels.gpu.experts import experts_route, takes
from turbospark.kernels.gpu.experts_geometry import ExpertGeometry
from turbospark.kernels.gpu.experts_mix import experts_down, experts_up
from turbospark.kernels.gpu.experts_scores import experts_scores, joined_router, scores_of_sum
from turbospark.kernels.gpu.experts_unit import (
    ExpertUnits,
    block_of,
    takes_block,
)
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.step_sums import StepSums, StreamSum, factors_of
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_is_the_weighted_sum_of_its_experts(case: ExpertCase, target: str) -> None:
    assert takes_block(case.block())
    assert case.error(_gpu(target)) < BOUNDS[case.dtype]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[1], CASES[7], CASES[8]], ids=str)
def test_scores_and_ranks_are_those_of_a_loop(case: ExpertCase, target: str) -> None:
    gpu, block = _gpu(target), case.block()
    scores = experts_scores(
        case.x(), block.router_norm, block.router, block.router_bias, target=gpu
    )
    assert largest_error(scores, case.scores()) < BOUNDS[mx.float32]
    hidden = experts_up(
        case.x(), block.norm, scores, block.experts, groups=block.groups, target=gpu
    )
    ids = hidden[:, case.top_k * (case.inner + 1) :][:, : case.top_k]
    assert ids.tolist() == case.ranks().tolist()


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("T", "E", "top_k"), ROUTES)
def test_ranks_are_those_of_a_stable_sort(
    T: int, E: int, top_k: int, renormalise: bool, target: str
) -> None:
    rng = np.random.default_rng(E)
    scores = mx.array(np.round(rng.normal(size=(T, E)) * 3).astype(np.float32) / 2)
    scale = mx.array(rng.uniform(0.5, 2, size=E).astype(np.float32))
    for given in (scores, scores.astype(mx.bfloat16)):
        ids, weights = experts_route(
            given, top_k, scale, renormalise=renormalise, target=_gpu(target)
        )
        wanted, shares = route_reference(given, top_k, scale, renormalise=renormalise)
        assert ids.dtype == mx.int32
        assert mx.array_equal(ids, wanted)
        assert largest_error(weights, np.array(shares)) < BOUNDS[mx.float32]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize(
    ("E", "groups", "top_k"),
    [(48, (8, 3), 6), (96, (32, 6), 16), (6, (3, 1), 2)],
)
def test_groups_leave_out_what_they_should(
    E: int, groups: tuple[int, int], top_k: int, target: str
) -> None:
    scores = mx.array(np.random.default_rng(E).integers(-4, 5, (5, E)).astype(np.float32))
    ids, weights = experts_route(scores, top_k, groups=groups, target=_gpu(target))
    kept, share = keep_groups_reference(scores, *groups)
    wanted, shares = route_reference(kept, top_k, renormalise=False)
    assert mx.array_equal(ids, wanted)
    assert largest_error(weights, np.array(shares * share)) < BOUNDS[mx.float32]


@pytest.mark.parametrize("target", TARGETS[1:])
def test_scores_below_every_other_still_rank(target: str) -> None:
    scores = mx.full((2, 40), -mx.inf)
    scores[:, 7] = 1.0
    ids, _ = experts_route(scores, 3, target=_gpu(target))
    assert ids.tolist() == [[7, 0, 1]] * 2


@pytest.mark.parametrize("target", TARGETS[1:])
def test_both_zeros_are_equal(target: str) -> None:
    ids, _ = experts_route(mx.array([[-1.0, -0.0, 0.0, -0.0]]), 3, target=_gpu(target))
    assert ids.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[5], CASES[7]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: ExpertCase, target: str) -> None:
    run, x = block_of(case.block(), _gpu(target)), case.x()
    together = run(x, case.residual)
    for m in {0, case.M // 2, case.M - 1}:
        assert mx.array_equal(together[m : m + 1], run(x[m : m + 1], case.residual))


def summed(case: ExpertCase) -> tuple[mx.array, StreamSum, StepSums]:
    """Rows that a norm's result is yet to be added to, and of what; eps is large."""
    branch, weight = rows(case.M, case.C, seed=30), 1 + rows(1, case.C, seed=31)[0] / 4
    factors = factors_of(Norm(weight, EPS))
    assert factors is not None
    h, sums = case.x() + 0, StepSums()
    parts = StreamSum(branch.astype(case.dtype), case.x(), factors)
    sums.put(h, parts)
    return h, parts, sums


def error_of_sum(case: ExpertCase, target: GpuTarget) -> float:
    """Of the rows that the scores are of."""
    _, parts, _ = summed(case)
    block, norm = case.block(), Norm(parts.norm[: case.C], EPS)
    made, whole = scores_of_sum(
        parts, block.router_norm, block.router, block.router_bias, target=target
    )
    wide = [np.array(x.astype(mx.float32)) for x in (parts.branch, parts.stream)]
    root = np.sqrt((wide[0] ** 2).mean(1, keepdims=True) + EPS)
    wanted = wide[1] + wide[0] / root * np.array(norm.weight)
    again = experts_scores(whole, block.router_norm, block.router, block.router_bias, target=target)
    assert whole.dtype == case.dtype
    return largest_error(whole, wanted) + float(mx.abs(made - again).max())


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[6], CASES[7]], ids=str)
def test_rows_may_be_summed_up_by_the_launch_that_scores_them(
    case: ExpertCase, target: str
) -> None:
    gpu = _gpu(target)
    assert error_of_sum(case, gpu) < BOUNDS[case.dtype]
    h, _, sums = summed(case)
    y = block_of(case.block(), gpu, sums)(h, case.residual)
    whole = sums.written(h)
    assert whole is not h
    assert mx.array_equal(y, block_of(case.block(), gpu)(whole, case.residual))
    assert mx.array_equal(y, block_of(case.block(), gpu, sums)(h, case.residual))


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (1, "branch_norm[K])", "0.0f)"),
        (1, "branch + row * K", "branch"),
        (1, "* root *", "*"),
        (1, "static_cast<float>(rounded.v[i])", "value[step].v[i] + normed"),
        (6, "added[step].v[i] = is_there ?", "added[step].v[i] = true ?"),
    ],
)
def test_a_mutation_of_the_sum_is_caught(number: int, old: str, new: str) -> None:
    case = CASES[number]
    assert not error_of_sum(case, mutated("experts_scores", old, new)) < BOUNDS[case.dtype]


def test_a_sum_that_is_read_too_early_is_caught() -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);\nadded_squares = 0.0f;"
    with pytest.raises(MetalRunError, match=r"race|uninitialised"):
        error_of_sum(CASES[6], mutated("experts_scores", barrier, "added_squares = 0.0f;"))


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("number", [3, 7])
def test_a_geometry_does_not_change_a_bit(
    number: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, gpu, made = CASES[number], _gpu(target), []
    for cut in (ExpertGeometry(1, 1, 1), ExpertGeometry(6, 2, 8), ExpertGeometry(16, 8, 4)):
        for name in ("up_geometry", "down_geometry"):
            monkeypatch.setattr(experts_module, name, lambda *_, cut=cut, **__: cut)
        made.append(case.run(gpu))
    assert mx.array_equal(made[0], made[1])
    assert mx.array_equal(made[0], made[2])


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    for case in (CASES[1], CASES[7]):
        assert mx.array_equal(case.run(EMULATION), case.run(BACKWARDS))


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("phase", list(Phase))
def test_the_unit_of_given_scores_serves_both_phases(phase: Phase, target: str) -> None:
    case = replace(CASES[0], M=3, shared=0, residual=False)
    experts, norm = case.experts(), case.norm_value(8)
    run = ExpertUnits(_gpu(target), rms_norm_reference).bind(norm, experts)
    assert run is not None
    scores, shared = mx.array(case.scores().astype(np.float32)), (case.x(), case.x()[:, :1])
    y = run(case.x(), scores, shared, phase)
    wanted = case.expected() + np.array(mx.sigmoid(shared[1]) * shared[0])
    # TF32 may multiply the rows of a prefill on a GPU.
    slack = 1 if target == "emulation" or phase is Phase.DECODE else 300
    assert largest_error(y, wanted) < slack * BOUNDS[case.dtype]


def test_the_unit_of_a_layer_serves_a_few_rows_of_decode() -> None:
    require_emulator()
    run = ExpertUnits(EMULATION, rms_norm_reference).bind_block(CASES[0].block())
    assert run is not None
    x = CASES[0].x()
    assert run(x, True, Phase.DECODE) is not None
    assert run(x, True, Phase.PREFILL) is None
    assert run(mx.zeros((9, 96)), True, Phase.DECODE) is None
    closing = ExpertUnits(EMULATION, rms_norm_reference).bind_block(CASES[1].block())
    assert closing is not None
    assert closing(CASES[1].x(), False, Phase.DECODE) is None


@pytest.mark.parametrize(
    ("case", "kernel", "old", "new", "what"),
    [
        (0, "experts_scores", "8 * (i % 4)", "8 * (i % 2)", None),
        (1, "experts_scores", "ready_of<0>(value[step])", "value[step]", None),
        (7, "experts_scores", "HAS_BIAS ?", "false ?", None),
        (0, "experts_scores", ", numbers[0])", ", 0.0f)", None),
        (9, "experts_scores", "value[step].v[i] = is_there ?", "value[step].v[i] = true ?", None),
        (9, "experts_scores", "shares[lane * SPLIT + part]", "shares[lane * SPLIT]", None),
        (
            9, "experts_scores", "threadgroup_barrier(mem_flags::mem_threadgroup);", "",
            "race|uninitialised",
        ),
        (1, "experts_up", "HAS_SCALE ? choice", "false ? choice", None),
        (2, "experts_up", "load_many<WORDS>(x + row * K", "load_many<WORDS>(x", None),
        (0, "experts_up", "squares = metal::fma", "float other = metal::fma", None),
        (0, "experts_up", ", numbers[0])", ", 0.0f)", None),
        (1, "experts_up", "is_shared ? shared_norm_weight : norm_weight", "norm_weight", None),
        (6, "experts_up", "lane < lanes ?", "true ?", None),
        (6, "experts_up", "part < PARTS) { squares_of", "true) { squares_of", "out of bounds"),
        (9, "experts_up", "slot + 1", "slot", None),
        (3, "experts_up", "quad * lanes", "quad * 32", "out of bounds|conflicting"),
        (3, "experts_up", "-static_cast<float>(ZERO)", "0.0f", None),
        (7, "experts_up", "HAS_BIAS &&", "false &&", None),
        (0, "experts_up", "is_shared ? IS : I", "IS", "never written"),
        (6, "experts_up", "member == 0 && lane < COLUMNS", "lane < COLUMNS", "conflicting|race"),
        (2, "experts_up", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race"),
        (0, "experts_down", "-score", "score", None),
        (2, "experts_down", "simd_broadcast(own_share, static_cast<ushort>(rank))", "0.5f", None),
        (7, "experts_down", "lane < lanes ?", "true ?", None),
        (3, "experts_down", "part += SIMDGROUPS", "part += 2 * SIMDGROUPS", "uninitialised"),
        (3, "experts_down", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race"),
        (4, "experts_up", "part.v[i + half] : part.v[i]", "part.v[i] : part.v[i]", None),
        (7, "experts_down", "HAS_BIAS ? base[rank]", "false ? base[rank]", None),
        (8, "experts_down", "value = value + other", "value = value", None),
        (0, "experts_down", "RESIDUAL ?", "false ?", None),
        (0, "experts_down", "&& n < N", "", "out of bounds|conflicting"),
        (1, "experts_close", "* b_scale *", "* a_scale *", None),
        (1, "experts_close", "sum * whole", "sum", None),
        (10, "experts_close", "is_there ? a[part]", "true ? a[part]", None),
        (10, "experts_close", "is_there ? b[part]", "true ? b[part]", None),
        (1, "experts_close", "partial[2 * THREADS / 32 + member]", "partial[member]", "race"),
    ],
)  # fmt: skip
def test_a_planted_mutation_is_caught(
    case: int,
    kernel: str,
    old: str,
    new: str,
    what: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("up_geometry", "down_geometry"):  # no multiple of it is a width
        monkeypatch.setattr(experts_module, name, lambda *_, **__: ExpertGeometry(5, 1, 2))
    target = mutated(kernel, old, new)
    if what is None:
        assert not CASES[case].error(target) < BOUNDS[CASES[case].dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            CASES[case].error(target)


def test_experts_without_a_body_run_the_reference() -> None:
    case = CASES[0]
    block, experts = case.block(), case.experts()
    units = ExpertUnits(EMULATION, rms_norm_reference)
    for other in (
        replace(experts, activation="gelu_erf"),
        replace(experts, biases=(mx.zeros((37, 32)), None, None)),
        replace(experts, gate=mx.zeros((37, 32, 96))),
        replace(experts, gate=replace(case, C=64, inner=64, group=64).experts().gate),
        replace(experts, top_k=17),
    ):
        assert not takes(other)
        assert units.bind(Norm(None, 1e-6), other) is None
        assert units.bind_block(replace(block, experts=other)) is None
    shared = block.shared
    assert shared is not None
    for other in (
        replace(block, router=case.matrix("6 bits", 37, 9)),
        replace(block, groups=(5, 2)),
        replace(block, shared=replace(shared, norm=Norm(None, 1e-3))),
        replace(block, shared=replace(shared, up=mx.zeros((96, 96)))),
        replace(block, post_norm=block.norm),
    ):
        assert units.bind_block(other) is None


def test_a_gate_of_another_layout_makes_a_dense_router() -> None:
    case = CASES[0]
    router, score = case.matrix("8 bits", 37, 9), case.matrix("8 bits", 1, 18)
    assert joined_router(router, None) is router
    joined = joined_router(router, score)
    assert joined.shape == (38, 96)
    assert not isinstance(joined, mx.array)
    mixed = joined_router(router, case.matrix("4 bits", 1, 18))
    assert isinstance(mixed, mx.array)
    assert mixed.dtype == mx.float32


def test_shapes_that_have_no_body_are_refused() -> None:
    case = CASES[0]
    experts, scores = case.experts(), mx.zeros((1, 37))
    with pytest.raises(ShapeError, match="takes scores of 1 to 512"):
        experts_route(mx.zeros((2, 513)), 3, target=EMULATION)
    with pytest.raises(ShapeError, match="ranks 1 to 16 of 37"):
        experts_route(scores, 17, target=EMULATION)
    with pytest.raises(ShapeError, match=r"takes a scale \(37,\)"):
        experts_route(scores, 3, mx.ones(3), target=EMULATION)
    with pytest.raises(ShapeError, match="cannot rank 3 of 37 experts in groups"):
        experts_route(scores, 3, groups=(5, 2), target=EMULATION)
    with pytest.raises(ShapeError, match="takes 1 to 8 rows of 96"):
        experts_up(mx.zeros((9, 96)), None, scores, experts, target=EMULATION)
    with pytest.raises(ShapeError, match="takes float32 scores"):
        experts_up(mx.zeros((2, 96)), None, scores, experts, target=EMULATION)
    with pytest.raises(ShapeError, match="takes 1 to 8 rows of 96"):
        experts_scores(mx.zeros((1, 95)), None, case.block().router, target=EMULATION)
    parts = StreamSum(mx.zeros((2, 96)), mx.zeros((1, 96)), mx.zeros((97,)))
    short = replace(parts, branch=parts.stream, norm=mx.zeros((96,)))
    for other, what in ((parts, r"\(2, 96\)"), (short, r"\(1, 96\) with a norm of 95")):
        with pytest.raises(ShapeError, match=f"adds no branch {what}"):
            scores_of_sum(other, None, case.block().router, target=EMULATION)
    with pytest.raises(ShapeError, match=r"takes hidden rows \(1, 104\)"):
        experts_down(mx.zeros((1, 96)), experts, dtype=mx.float32, target=EMULATION)
    hidden, residual = mx.zeros((1, 104)), mx.zeros((2, 96))
    with pytest.raises(ShapeError, match=r"adds a residual \(1, 96\)"):
        experts_down(hidden, experts, None, residual, dtype=mx.float32, target=EMULATION)


def _gpu(name: str) -> GpuTarget:
    target = resolve(name)
    assert target is not None
    return target

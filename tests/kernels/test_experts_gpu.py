"""Routed experts on GPUs against loops over rows and experts in float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import BACKWARDS, EMULATION, TARGETS, mutated, resolve
from kernels.cases_gpu_delta import BOUNDS, largest_error
from kernels.cases_gpu_experts import CASES, ROUTES, ExpertCase
from metal_emu import MetalRunError, require_emulator

from turbospark.errors import ShapeError
from turbospark.kernels.experts import mix_experts_sorted, route_reference
from turbospark.kernels.gpu import experts as experts_module
from turbospark.kernels.gpu.experts import (
    experts_down,
    experts_route,
    experts_up,
    mix_experts,
    takes,
)
from turbospark.kernels.gpu.experts_geometry import ExpertGeometry
from turbospark.kernels.gpu.experts_unit import ExpertUnits
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import ClampedSwiGLU, Norm
from turbospark.protocols import Phase


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mix_is_the_weighted_sum_of_experts(case: ExpertCase, target: str) -> None:
    assert case.error(_gpu(target)) < BOUNDS[case.dtype]


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
def test_scores_below_every_other_still_rank(target: str) -> None:
    scores = mx.full((2, 40), -mx.inf)
    scores[:, 7] = 1.0
    ids, _ = experts_route(scores, 3, target=_gpu(target))
    assert ids[:, 0].tolist() == [7, 7]
    assert bool(((ids >= 0) & (ids < 40)).all())


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[5]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: ExpertCase, target: str) -> None:
    gpu, experts, norm = _gpu(target), case.weights(), case.norm_value()
    x, scores, shared = case.x(), case.scores(), case.shared()
    together = case.run(gpu)
    for m in {0, case.M // 2, case.M - 1}:
        own = slice(m, m + 1)
        part = None if shared is None else (shared[0][own], shared[1][own])
        alone = mix_experts(x[own], norm, scores[own], experts, part, target=gpu)
        assert mx.array_equal(together[own], alone)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_a_geometry_does_not_change_a_bit(target: str) -> None:
    case, gpu = CASES[3], _gpu(target)
    experts = case.weights()
    ids, weights = experts_route(case.scores(), case.top_k, target=gpu)
    made = []
    for cut in (ExpertGeometry(1, 1), ExpertGeometry(3, 2), ExpertGeometry(4, 8)):
        hidden = experts_up(case.x(), None, ids, experts, target=gpu, geometry=cut)
        made.append(
            experts_down(hidden, ids, weights, experts, dtype=mx.float32, target=gpu, geometry=cut)
        )
    assert mx.array_equal(made[0], made[1])
    assert mx.array_equal(made[0], made[2])


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    assert mx.array_equal(CASES[1].run(EMULATION), CASES[1].run(BACKWARDS))


@pytest.mark.parametrize("case", [replace(CASES[1], M=23), replace(CASES[3], M=17)], ids=str)
def test_many_rows_are_sorted_by_their_experts(case: ExpertCase) -> None:
    experts = case.weights()
    ids, weights = route_reference(case.scores(), case.top_k, experts.scale)
    y = rms_norm_reference(case.x().astype(mx.float32), case.norm_value())
    made = mix_experts_sorted(y, ids, weights, experts)
    wanted = replace(case, has_shared=False).expected()
    assert largest_error(made, wanted) < BOUNDS[mx.float32]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("phase", list(Phase))
def test_the_unit_serves_both_phases(phase: Phase, target: str) -> None:
    case = replace(CASES[0], M=3)
    norm = case.norm_value()
    assert norm is not None
    run = ExpertUnits(_gpu(target), rms_norm_reference).bind(norm, case.weights())
    assert run is not None
    y = run(case.x(), case.scores(), case.shared(), phase)
    # TF32 may multiply the rows of a prefill on a GPU.
    slack = 1 if target == "emulation" or phase is Phase.DECODE else 300
    assert largest_error(y, case.expected()) < slack * BOUNDS[case.dtype]


@pytest.mark.parametrize(
    ("case", "kernel", "old", "new", "what"),
    [
        (1, "experts_route", "HAS_SCALE ?", "false ?", None),
        (2, "experts_route", "if (!RENORMALISE)", "if (false)", None),
        (2, "experts_up", "slot / TOP * K", "0", None),
        (0, "experts_up", "squares = metal::fma", "float other = metal::fma", None),
        (0, "experts_up", ", numbers[0])", ", 0.0f)", None),
        (1, "experts_up", "value.v[i] * factor.v[i]", "value.v[i]", None),
        (3, "experts_up", "* -static_cast<float>(ZERO)", "", None),
        (0, "experts_up", "lane == 0 && ", "", "conflicting|race"),
        (0, "experts_down", "metal::fma(opening,", "metal::fma(1.0f,", None),
        (2, "experts_down", "share = weights[row * TOP + rank + b]", "share = 0.5f", None),
        (3, "experts_down", "rank += BATCH", "rank += 2 * BATCH", None),
        (0, "experts_down", "&& n < N", "", "out of bounds|conflicting"),
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
        monkeypatch.setattr(experts_module, name, lambda *_: ExpertGeometry(5, 2))
    target = mutated(kernel, old, new)
    if what is None:
        assert not CASES[case].error(target) < BOUNDS[CASES[case].dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            CASES[case].error(target)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("score[i] > best", "score[i] >= best"),
        ("? -index : -(E - 1)", "? index : -(E - 1)"),
        ("taken | (1u << (index / 32))", "taken"),
        ("lane + 32 * i < E && ", ""),
    ],
)
def test_a_mutation_of_the_ranks_is_caught(old: str, new: str) -> None:
    scores = mx.stack([mx.zeros(100), mx.arange(100, dtype=mx.float32)])
    ids, _ = experts_route(scores, 5, target=mutated("experts_route", old, new))
    assert ids.tolist() != [[0, 1, 2, 3, 4], [99, 98, 97, 96, 95]]


def test_experts_without_a_body_run_the_reference() -> None:
    experts = CASES[0].weights()
    units = ExpertUnits(EMULATION, rms_norm_reference)
    for other in (
        replace(experts, activation=ClampedSwiGLU(1.7, 7.0)),
        replace(experts, biases=(mx.zeros((37, 32)), None, None)),
        replace(experts, gate=mx.zeros((37, 32, 96))),
        replace(experts, gate=replace(CASES[0], C=64, inner=64, group=64).weights().gate),
        replace(experts, top_k=17),
    ):
        assert not takes(other)
        assert units.bind(Norm(None, 1e-6), other) is None


def test_shapes_that_have_no_body_are_refused() -> None:
    case = CASES[0]
    experts, scores = case.weights(), case.scores()
    with pytest.raises(ShapeError, match="takes scores of 1 to 512"):
        experts_route(mx.zeros((2, 513)), 3, target=EMULATION)
    with pytest.raises(ShapeError, match="ranks 1 to 16 of 37"):
        experts_route(scores, 17, target=EMULATION)
    with pytest.raises(ShapeError, match=r"takes a scale \(37,\)"):
        experts_route(scores, 3, mx.ones(3), target=EMULATION)
    ids = mx.zeros((9, 3), mx.int32)
    with pytest.raises(ShapeError, match="takes 1 to 8 rows of 96"):
        experts_up(mx.zeros((9, 96)), None, ids, experts, target=EMULATION)
    with pytest.raises(ShapeError, match="takes hidden rows"):
        experts_down(
            mx.zeros((1, 3, 31)), ids[:1], mx.zeros((1, 3)), experts, dtype=mx.float32,
            target=EMULATION,
        )  # fmt: skip
    hidden, shared = mx.zeros((1, 3, 32)), (mx.zeros((1, 95)), mx.zeros((1, 1)))
    with pytest.raises(ShapeError, match="adds a shared expert"):
        experts_down(
            hidden, ids[:1], mx.zeros((1, 3)), experts, shared, dtype=mx.float32, target=EMULATION
        )


def _gpu(name: str) -> GpuTarget:
    target = resolve(name)
    assert target is not None
    return target

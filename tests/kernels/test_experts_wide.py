"""Routed experts of many rows on GPUs: sorted, multiplied together, summed up."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import TARGETS, mutated, resolve
from kernels.cases_gpu_delta import BOUNDS, largest_error
from kernels.cases_gpu_experts import BF16, CASES, ExpertCase
from metal_emu import MetalRunError

from turbospark.kernels import experts as module
from turbospark.kernels.experts import (
    mix_experts_reference,
    mix_experts_sorted,
    route_reference,
)
from turbospark.kernels.gpu.experts_unit import ExpertUnits
from turbospark.kernels.gpu.experts_wide import dense_experts, mix_sorted
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.protocols import Phase


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [replace(CASES[1], M=23), replace(CASES[3], M=17)], ids=str)
def test_many_rows_are_sorted_by_their_experts(case: ExpertCase, target: str) -> None:
    experts = case.experts()
    scores = mx.array(case.scores().astype(np.float32))
    ids, weights = route_reference(scores, case.top_k, experts.scale)
    y = rms_norm_reference(case.x().astype(mx.float32), case.norm_value(8))
    gpu = resolve(target)
    if gpu is None:
        made = mix_experts_sorted(y, ids, weights, experts)
    else:
        made = mix_sorted(y, ids, weights, experts, target=gpu)
    wanted = mix_experts_reference(y, ids, weights, experts)
    assert largest_error(made, np.array(wanted)) < BOUNDS[mx.float32]


def test_sorted_rows_lie_a_row_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    strides: list[tuple[int, ...]] = []
    multiply = module.expert_matmul_reference

    def noting(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        strides.append(np.asarray(x.astype(mx.float32)).strides)
        return multiply(x, *arguments, **options)

    monkeypatch.setattr(module, "expert_matmul_reference", noting)
    case = replace(CASES[1], M=23)
    ids, _ = route_reference(mx.array(case.scores().astype(np.float32)), case.top_k)
    module.expert_outputs_sorted(case.x().astype(mx.float32), ids, case.experts())
    assert [rows[1] for rows in strides] == [rows[0] for rows in strides]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("row * TOP + rank]);", "row * TOP]);", None),
        ("if (column < N)", "", "out of bounds|conflicting"),
    ],
)
def test_a_mutation_of_the_join_is_caught(old: str, new: str, what: str | None) -> None:
    case = CASES[2]
    experts, y = case.experts(), case.x()
    ids, weights = route_reference(mx.array(case.scores().astype(np.float32)), case.top_k)
    target = mutated("experts_join", old, new)
    if what is not None:
        with pytest.raises(MetalRunError, match=what):
            mix_sorted(y, ids, weights, experts, target=target)
        return
    made = mix_sorted(y, ids, weights, experts, target=target)
    wanted = mix_experts_reference(y, ids, weights, experts)
    assert largest_error(made, np.array(wanted.astype(mx.float32))) > 0.05


@pytest.mark.parametrize("case", [CASES[3], CASES[7]], ids=str)
def test_dense_experts_are_what_their_codes_stand_for(case: ExpertCase) -> None:
    experts = case.experts()
    dense = dense_experts(experts)
    for made, given in zip(
        (dense.gate, dense.up, dense.down), (experts.gate, experts.up, experts.down), strict=True
    ):
        assert isinstance(made, mx.array)
        assert largest_error(made, np.array(dequantize_reference(given))) < 5e-3


@pytest.mark.cuda
@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=str)
def test_many_rows_are_multiplied_by_dense_experts(case: ExpertCase) -> None:
    gpu = resolve("cuda")
    assert gpu is not None
    case = replace(case, M=61, shared=0, residual=False, dtype=BF16)
    experts, norm = case.experts(), case.norm_value(8)
    run = ExpertUnits(gpu, rms_norm_reference, dense=True).bind(norm, experts)
    assert run is not None
    scores = mx.array(case.scores().astype(np.float32))
    y = run(case.x(), scores, None, Phase.PREFILL)
    assert largest_error(y, case.expected()) < 4 * BOUNDS[BF16]

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import ROUNDING, TARGETS, mutated, resolve
from kernels.matrices import relative_error, rows
from metal_emu import MetalRunError

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.weights import Norm

EPS = 1e-2  # large, so that leaving it out shows
SLACK = 4


@dataclass(frozen=True)
class NormCase:
    shape: tuple[int, ...]
    dtype: mx.Dtype
    weight_dtype: mx.Dtype | None
    groups: int = 0
    plus_one: bool = False
    has_residual: bool = False
    multiple: float = 1.0

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        form = "-groups" * bool(self.groups) + "-plus" * self.plus_one + "-add" * self.has_residual
        form += "" if self.multiple == 1.0 else "-times"
        return f"{size}-{self.dtype}-{self.weight_dtype}{form}".replace("mlx.core.", "")

    def norm(self) -> Norm:
        if self.weight_dtype is None:
            return Norm(None, EPS)
        weight = rows(max(1, self.groups), self.shape[-1], seed=2).astype(self.weight_dtype)
        return Norm(weight if self.groups else weight[0], EPS)

    def residual(self) -> mx.array | None:
        x = rows(self.shape[0], int(np.prod(self.shape[1:])), seed=3).reshape(self.shape)
        return x.astype(self.dtype) if self.has_residual else None

    def x(self) -> mx.array:
        return (
            rows(self.shape[0], int(np.prod(self.shape[1:]))).reshape(self.shape).astype(self.dtype)
        )


CASES = [
    NormCase((1, 5), mx.float32, mx.float32),
    NormCase((3, 129), mx.float32, None),
    NormCase((2, 640), mx.float16, mx.bfloat16),
    NormCase((5, 1407), mx.bfloat16, mx.float32),
    NormCase((4, 3, 80), mx.bfloat16, mx.bfloat16),
    NormCase((1, 2817), mx.float16, mx.float16),
    NormCase((2, 5376), mx.bfloat16, mx.bfloat16, has_residual=True),
    NormCase((3, 2, 136), mx.float32, mx.float16, groups=2, plus_one=True),
    NormCase((1, 3, 77), mx.float16, mx.float32, groups=3, has_residual=True),
    NormCase((3, 264), mx.bfloat16, mx.float32, has_residual=True, multiple=-0.375),
]


def error(case: NormCase, target: GpuTarget | None) -> float:
    x, norm = case.x(), case.norm()
    residual = case.residual()
    multiple = None if case.multiple == 1.0 else mx.array([case.multiple])
    y = rms_norm(x, norm, residual, multiple=multiple, plus_one=case.plus_one, target=target)
    assert y.shape == case.shape
    assert y.dtype == case.dtype
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    if norm.weight is not None:
        expected = expected * (np.array(norm.weight.astype(mx.float32)) + case.plus_one)
    if residual is not None:
        expected = expected + np.array(residual.astype(mx.float32))
    return relative_error(y.astype(mx.float32), expected * case.multiple)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rms_norm_divides_by_the_root_mean_square(case: NormCase, target: str) -> None:
    assert error(case, resolve(target)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", TARGETS[1:])
def test_a_row_does_not_depend_on_its_neighbours(target: str) -> None:
    x, norm, gpu = CASES[3].x(), CASES[3].norm(), resolve(target)
    together = rms_norm(x, norm, target=gpu)
    alone = [rms_norm(row[None], norm, target=gpu) for row in x]
    assert mx.array_equal(together, mx.concatenate(alone))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race on|uninitialised"),
        ("if (thread_index_in_simdgroup == 0)", "", "race on"),
        ("group < THREADS / 32", "group <= THREADS / 32", "outside|out of bounds|uninit"),
        (
            "if (d < D) {\n    store_pack",
            "if (d <= D) {\n    store_pack",
            "out of bounds|conflicting",
        ),
        ("+ eps[0]", "", None),
        ("* (factor[p][i]", "* (1.0f", None),
        ("square_sum = simd_sum(square_sum);", "", None),
        ("base[p][i] + normed", "normed", None),
        (") * whole", ")", None),
        ("row % GROUPS * D", "0", None),
        ("+ ADDED", "", None),
    ],
)
def test_a_planted_mutation_is_caught(old: str, new: str, what: str | None) -> None:
    case = NormCase((3, 2, 648), mx.float32, mx.float16, 2, True, True, multiple=1.5)
    if what is None:
        assert error(case, mutated("rms_norm", old, new)) > SLACK * ROUNDING[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            error(case, mutated("rms_norm", old, new))


def test_rows_that_have_no_norm_are_refused() -> None:
    with pytest.raises(ShapeError, match="takes rows"):
        rms_norm(mx.zeros((0, 4)), Norm(None, EPS))
    with pytest.raises(ShapeError, match=r"takes a weight \(4,\)"):
        rms_norm(mx.zeros((3, 4)), Norm(mx.ones(3), EPS))
    with pytest.raises(ShapeError, match=r"takes no residual \(4,\)"):
        rms_norm(mx.zeros((3, 4)), Norm(None, EPS), mx.zeros(4))

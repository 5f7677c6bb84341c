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

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{size}-{self.dtype}-{self.weight_dtype}".replace("mlx.core.", "")

    def norm(self) -> Norm:
        if self.weight_dtype is None:
            return Norm(None, EPS)
        return Norm(rows(1, self.shape[-1], seed=2)[0].astype(self.weight_dtype), EPS)

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
]


def error(case: NormCase, target: GpuTarget | None) -> float:
    x, norm = case.x(), case.norm()
    y = rms_norm(x, norm, target=target)
    assert y.shape == case.shape
    assert y.dtype == case.dtype
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    if norm.weight is not None:
        expected = expected * np.array(norm.weight.astype(mx.float32))
    return relative_error(y.astype(mx.float32), expected)


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
        ("if (lane == 0)", "", "race on"),
        ("lane < THREADS / 32 ? partial[lane] : 0.0f", "partial[lane]", "index 5 out of bounds"),
        ("d < D; d += THREADS) {\n  const float factor", "d < D + 1; d += THREADS) {\n"
         "  const float factor", "out of bounds|conflicting"),
        ("+ eps[0]", "", None),
        ("* factor", "", None),
        ("square_sum = simd_sum(square_sum);", "", None),
    ],
)  # fmt: skip
def test_a_planted_mutation_is_caught(old: str, new: str, what: str | None) -> None:
    case = CASES[2]
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

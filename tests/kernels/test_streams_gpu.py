"""Bodies for residual streams against float64."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import EMULATION, ROUNDING, TARGETS, mutated, resolve
from kernels.matrices import relative_error, rows
from metal_emu import MetalRunError, require_emulator

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.streams import streams_mix, streams_norm
from turbospark.kernels.weights import Norm

EPS = 1e-2  # large, so that leaving it out shows
SLACK = 6


@dataclass(frozen=True)
class StreamCase:
    T: int
    groups: int
    dims: int
    dtype: mx.Dtype
    weight_dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        size = f"{self.T}x{self.groups}x{self.dims}"
        return f"{size}-{self.dtype}-{self.weight_dtype}".replace("mlx.core.", "")

    def draw(self, width: int, seed: int) -> mx.array:
        return rows(self.T, width, seed=seed).astype(self.dtype)

    def norm(self) -> Norm:
        return Norm(rows(1, self.groups * self.dims, seed=9)[0].astype(self.weight_dtype), EPS)


F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
CASES = [
    StreamCase(1, 3, 5, F32),
    StreamCase(3, 2, 129, F32, BF16),
    StreamCase(2, 4, 640, BF16, BF16),
    StreamCase(5, 4, 2560, F16),
    StreamCase(1, 3, 1407, BF16, F32),
]
RESOLVED = TARGETS[1:]


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def norm_error(case: StreamCase, target: GpuTarget) -> float:
    G, C = case.groups, case.dims
    h, y, shares = (case.draw(width, i) for i, width in enumerate((G * C, C, G), 1))
    after, normed = streams_norm(h, (y, shares), case.norm(), target=target)
    assert after.dtype == normed.dtype == case.dtype
    sums = wide(h).reshape(case.T, G, C) + wide(shares)[..., None] * wide(y)[:, None]
    given = wide(after).reshape(sums.shape)
    scaled = given / np.sqrt((given**2).mean(axis=-1, keepdims=True) + EPS)
    weight = case.norm().weight
    assert weight is not None
    expected = scaled.reshape(case.T, -1) * wide(weight)
    return max(
        relative_error(after.astype(mx.float32), sums.reshape(case.T, -1)),
        relative_error(normed.astype(mx.float32), expected),
    )


def mix_error(case: StreamCase, target: GpuTarget, *, opens: bool = True) -> float:
    G, C = case.groups, case.dims
    up, normed, inject = (case.draw(width, i) for i, width in enumerate((G * C, G * C, G), 1))
    mixed, opened = streams_mix(up, normed, inject if opens else None, G, target=target)
    expected = (sigmoid(wide(up)) * wide(normed)).reshape(case.T, G, C).mean(axis=1)
    error = relative_error(mixed.astype(mx.float32), expected)
    assert (opened is not None) == opens
    if opened is None:
        return error
    shares = 2 * sigmoid(wide(inject) / G)
    return max(error, relative_error(opened.astype(mx.float32), shares))


@pytest.mark.parametrize("target", RESOLVED)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_are_added_to_and_normed(case: StreamCase, target: str) -> None:
    gpu = resolve(target)
    assert gpu is not None
    assert norm_error(case, gpu) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", RESOLVED)
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_are_mixed(case: StreamCase, target: str, opens: bool) -> None:
    gpu = resolve(target)
    assert gpu is not None
    assert mix_error(case, gpu, opens=opens) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize(
    ("body", "old", "new", "what"),
    [
        ("norm", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race on|uninitialised"),
        ("norm", "stream / GROUPS * D", "0", None),
        ("norm", "stream % GROUPS * D", "0", None),
        ("norm", "shares[stream]", "shares[0]", None),
        ("norm", "+ eps[0]", "", None),
        ("norm", "square_sum = simd_sum(square_sum);", "", None),
        ("norm", "* factor", "", None),
        ("open", "column < D", "column <= D", "out of bounds|conflicting|outside"),
        ("open", "gated(2.0f,", "gated(1.0f,", None),
        ("open", "total * mean", "total", None),
        ("open", "(row * GROUPS + group)", "(row * GROUPS)", None),
        ("open", "static_cast<float>(inject[at]) * mean", "static_cast<float>(inject[at])", None),
    ],
)
def test_a_planted_mutation_is_caught(body: str, old: str, new: str, what: str | None) -> None:
    case = StreamCase(3, 2, 648, F32, F16)
    check = norm_error if body == "norm" else mix_error
    mutant = mutated(f"streams_{body}", old, new)
    if what is None:
        assert check(case, mutant) > SLACK * ROUNDING[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            check(case, mutant)


def test_streams_of_other_sizes_are_refused() -> None:
    require_emulator()
    h, y, norm = rows(3, 12), rows(3, 4), Norm(rows(1, 12)[0], EPS)
    for said in ((rows(3, 5), rows(3, 3)), (rows(2, 4), rows(3, 3)), (y, rows(3, 2))):
        with pytest.raises(ShapeError, match="streams"):
            streams_norm(h, said, norm, target=EMULATION)
    with pytest.raises(ShapeError, match="not mixed by"):
        streams_mix(h, rows(3, 11), None, 3, target=EMULATION)
    with pytest.raises(ShapeError, match="have no shares"):
        streams_mix(h, h, rows(3, 4), 3, target=EMULATION)

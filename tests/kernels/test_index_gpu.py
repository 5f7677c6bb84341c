"""The body that writes rows of a block index against its reference."""

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import EMULATION, TARGETS, mutated, resolve
from kernels.cases_gpu_index import CASES, EPS, IndexCase
from kernels.matrices import rows
from metal_emu import MetalRunError, require_emulator

from turbospark.caches.step import StepCache
from turbospark.errors import ShapeError
from turbospark.kernels.gpu.index_rows import IndexUnit, index_rows
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.nn.block_sparse import BlockIndex
from turbospark.nn.linear import RMSNorm

BOUNDS = {mx.float32: 2e-6, mx.float16: 3e-3, mx.bfloat16: 2e-2}


def error(case: IndexCase, target: GpuTarget) -> float:
    norm = RMSNorm(case.dims, EPS)
    weight = case.norm().weight
    assert weight is not None
    norm.weight = weight
    reference = BlockIndex(case.index, case.rope(), norm, norm)
    cache = StepCache(case.rows())
    reference.append(case.raw(), cache)
    wanted = cache.rows().tail
    made = case.run(target)
    assert np.array_equal(
        np.array(made.k.astype(mx.float32)), np.array(wanted.k.astype(mx.float32))
    )
    got, other = (np.array(block.v.astype(mx.float32)) for block in (made, wanted))
    return float(np.abs(got - other).max())


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_an_index_are_those_of_the_reference(case: IndexCase, target: str) -> None:
    gpu = resolve(target)
    assert gpu is not None
    assert error(case, gpu) < BOUNDS[case.dtype]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race on|uninitialised"),
        ("+ numbers[0]", "", None),
        ("numbers[1]", "1.0f", None),
        ("square_sum = simd_sum(square_sum);", "", None),
        ("position % R == R - 1", "position % R == 0", None),
        ("static_cast<float>(position - (R - 1)) *", "static_cast<float>(position) *", None),
        ("at >= boundary", "at >= 0", "out of bounds|outside|uninit|negative"),
        ("-normed[pair + PAIRS]", "normed[pair + PAIRS]", None),
        ("d < 2 * PAIRS", "d < PAIRS", None),
        ("* factor", "", None),
    ],
)
def test_a_planted_mutation_is_caught(old: str, new: str, what: str | None) -> None:
    case = IndexCase(5, 70, 20, 4, 59, 58)
    mutant = mutated("index_rows", old, new)
    if what is None:
        assert error(case, mutant) > 10 * BOUNDS[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            error(case, mutant)


def test_rows_of_other_sizes_are_refused() -> None:
    require_emulator()
    case = CASES[2]
    unit = IndexUnit.build(case.index, case.norm(), case.rope())
    for raw in (rows(9, 40), rows(2, 39), rows(2, 40)[0]):
        with pytest.raises(ShapeError, match="takes no rows"):
            index_rows(raw, case.rows(), unit, target=EMULATION)

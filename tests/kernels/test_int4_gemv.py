import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import BACKWARDS, EMULATION, ROUNDING, TARGETS, mutated, resolve
from kernels.cases_gpu_int4_gemv import CASES, LARGE, GemvCase
from kernels.matrices import quantized, relative_error, rows
from metal_emu import MetalRunError, require_emulator

from turbospark.errors import KernelError, ShapeError
from turbospark.kernels.gpu.int4_gemv import int4_gemv
from turbospark.kernels.gpu.int4_geometry import vector_geometry
from turbospark.kernels.gpu.int4_product import Int4Product, takes
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel

# A sum over K adds rounding of its own, and results below the root mean square keep their ulp.
SLACK = 4


def error(case: GemvCase, target: GpuTarget | None) -> float:
    weight, values = case.weight()
    x = case.x()
    y = int4_gemv(x, weight, target=target)
    assert y.shape == (case.M, case.N)
    assert y.dtype == case.dtype
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    return relative_error(y.astype(mx.float32), wide @ values.T)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_int4_gemv_is_the_product_with_the_dequantized_weight(case: GemvCase, target: str) -> None:
    assert error(case, resolve(target)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_int4_gemv_takes_the_geometry_of_large_weights(case: GemvCase, target: str) -> None:
    product = Int4Product((case.weight()[0],), (None,))
    assert vector_geometry("emulation", product, case.M).simdgroups == 8
    assert error(case, resolve(target)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[2], CASES[7], LARGE[1]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: GemvCase, target: str) -> None:
    weight, _ = case.weight()
    x, gpu = case.x(), resolve(target)
    together = int4_gemv(x, weight, target=gpu)
    for m in range(case.M):
        alone = int4_gemv(x[m : m + 1], weight, target=gpu)
        assert mx.array_equal(together[m : m + 1], alone)


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    weight, _ = CASES[3].weight()
    results = [int4_gemv(CASES[3].x(), weight, target=t) for t in (EMULATION, BACKWARDS)]
    assert mx.array_equal(*results)


@pytest.mark.parametrize("target", TARGETS)
def test_the_result_may_have_a_dtype_of_its_own(target: str) -> None:
    weight, values = quantized(7, 64, 4, 32)
    x = rows(1, 64).astype(mx.float16)
    y = int4_gemv(x, weight, dtype=mx.float32, target=resolve(target))
    assert y.dtype == mx.float32
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    assert relative_error(y, wide @ values.T) < SLACK * ROUNDING[mx.float32]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("&& n < columns", "", "out of bounds of buffer 'y0'|conflicting"),
        (
            "metal::min(first + r % ROWS, columns - 1)",
            "first + r % ROWS",
            "out of bounds of buffer 'codes0'",
        ),
        ("if (lane == 0 &&", "if (", "conflicting"),
        ("K / GROUP) + k / GROUP", "K / GROUP) + k / GROUP + 1", "out of bounds of buffer"),
        ("K / 8) + k / 8", "K / 8) + k / 8 - 1", "out of bounds|misaligned"),
        ("k += 32 * 8 * WORDS", "k += 64 * 8 * WORDS", None),
        ("metal::fma(offset[r], sum, total[m][r])", "total[m][r]", None),
        ("metal::fma(scale[r], dot,", "metal::fma(1.0f, dot,", None),
        ("words[r].v[w] >> 16", "words[r].v[w] >> 15", None),
    ],
)
def test_a_planted_mutation_is_caught(old: str, new: str, what: str | None) -> None:
    case = CASES[7]
    if what is None:
        assert error(case, mutated("int4_gemv_1", old, new)) > SLACK * ROUNDING[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            error(case, mutated("int4_gemv_1", old, new))


def test_shapes_that_have_no_body_are_refused() -> None:
    weight, _ = quantized(7, 96, 4, 32)
    eight_bit, _ = quantized(7, 96, 8, 32)
    assert takes(weight)
    assert not takes(eight_bit)
    assert not takes(mx.zeros((7, 96)))
    with pytest.raises(ShapeError, match="8-bit"):
        int4_gemv(rows(1, 96), eight_bit)
    for wrong in (rows(9, 96), rows(2, 64), rows(1, 96)[0], rows(1, 96).astype(mx.int32)):
        with pytest.raises(ShapeError, match="int4_gemv takes"):
            int4_gemv(wrong, weight)


@pytest.mark.parametrize(
    ("scalar", "size", "grid", "message"),
    [
        (True, 1, (32, 1, 1), "an input has no dimensions"),
        (False, -1, (32, 1, 1), "a template value is below 0"),
        (False, 1, (32, 3, 1), "no multiple of threadgroup"),
    ],
)
def test_a_launch_that_breaks_a_rule_is_refused(
    scalar: bool, size: int, grid: tuple[int, int, int], message: str
) -> None:
    x = mx.zeros(() if scalar else (1, 32))
    with pytest.raises(KernelError, match=message):
        Kernel("int4_rows", ("x", "a", "b", "c"), ("y",))(
            EMULATION,
            [x] * 4,
            template={"M": size},
            grid=grid,
            threadgroup=(32, 2, 1),
            outputs=[],
        )

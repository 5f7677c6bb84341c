import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import TARGETS, mutated, resolve
from kernels.cases_gpu_int4_product import CASES, TOLERANCE, ProductCase
from metal_emu import MetalRunError

from turbospark.errors import ShapeError
from turbospark.kernels.gpu import int4_mma
from turbospark.kernels.gpu.int4_gemv import vector_product
from turbospark.kernels.gpu.int4_mma import Geometry, choose_geometry
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.weights import QuantizedWeight

TENSOR_CASES = [case.in_groups_of_64() for case in CASES]


def composed(case: ProductCase, *, rounded: bool = False) -> list[mx.array]:
    """The form in float32; `rounded` rounds the normed rows to the dtype of x, as tensors do."""
    product, x = case.product(), case.x()
    if rounded and product.norm is not None:
        wide = mx.fast.rms_norm(x.astype(mx.float32), product.norm.weight, product.norm.eps)
        product, x = replace(product, norm=None), wide.astype(case.dtype)
    return product.reference(x, case.added())


def error(got: list[mx.array], wanted: list[mx.array]) -> float:
    """Largest difference over the largest value of each result."""
    wide = [(g.astype(mx.float32), w.astype(mx.float32)) for g, w in zip(got, wanted, strict=True)]
    return max(float(mx.abs(g - w).max() / mx.abs(w).max()) for g, w in wide)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fused_form_equals_its_composition(case: ProductCase, target: str) -> None:
    got = vector_product(case.product(), case.x(), case.added(), resolve(target))
    wanted = composed(case)
    assert [(y.shape, y.dtype) for y in got] == [(y.shape, y.dtype) for y in wanted]
    assert error(got, wanted) < TOLERANCE[case.dtype]


@pytest.mark.cuda
@pytest.mark.parametrize("case", TENSOR_CASES, ids=str)
def test_a_fused_form_on_tensor_cores_equals_its_composition(case: ProductCase) -> None:
    target = resolve("cuda")
    assert target is not None
    got = int4_mma.int4_mma(case.product(), case.x(), case.added(), target)
    assert error(got, composed(case, rounded=True)) < TOLERANCE[case.dtype]


def alone(case: ProductCase, m: int, target: GpuTarget | None, tensor: bool) -> list[mx.array]:
    added = case.added()
    row = case.x()[m : m + 1]
    more = None if added is None else added[m : m + 1]
    if tensor and target is not None:
        return int4_mma.int4_mma(case.product(), row, more, target)
    return vector_product(case.product(), row, more, target)


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[7]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: ProductCase, target: str) -> None:
    gpu = resolve(target)
    together = vector_product(case.product(), case.x(), case.added(), gpu)
    for m in range(case.M):
        for all_rows, row in zip(together, alone(case, m, gpu, False), strict=True):
            assert mx.array_equal(all_rows[m : m + 1], row)


@pytest.mark.cuda
@pytest.mark.parametrize("case", [TENSOR_CASES[2], TENSOR_CASES[4], TENSOR_CASES[7]], ids=str)
@pytest.mark.parametrize(("staged", "tall"), [(True, 1), (True, 2), (False, 1), (False, 2)])
def test_a_row_on_tensor_cores_does_not_depend_on_its_neighbours(
    case: ProductCase, staged: bool, tall: int
) -> None:
    target, product = resolve("cuda"), case.product()
    assert target is not None
    if product.norm is not None and not staged:
        pytest.skip("a norm stages x")
    chosen = choose_geometry(product, case.M)
    cut = Geometry(chosen.warps, chosen.step, 3, 1, staged, tall)
    together = int4_mma.int4_mma(product, case.x(), case.added(), target, cut)
    for m in range(case.M):
        for all_rows, row in zip(together, alone(case, m, target, True), strict=True):
            assert mx.array_equal(all_rows[m : m + 1], row)


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (CASES[4], "activate<ACTIVATION>(value)", "value"),
        (CASES[3], "metal::min(first + r % ROWS, columns - 1)", "first + r % ROWS"),
        (CASES[2], "simd_sum(squares[m])", "simd_sum(total[m][0])"),
        (CASES[3], "unit -= UNITS(PART(N, i), ROWS);", "unit -= UNITS(PART(N, i), ROWS) - 1;"),
        (CASES[6], "residual[m * N0 + n]", "residual[n]"),
    ],
    ids=["activation", "row", "norm", "part", "residual"],
)
def test_a_planted_mistake_is_caught(case: ProductCase, old: str, new: str) -> None:
    kernel = case.product().kernel("int4_gemv").name
    try:
        got = vector_product(case.product(), case.x(), case.added(), mutated(kernel, old, new))
    except MetalRunError:
        return
    wrong = error(got, composed(case))
    assert not wrong < TOLERANCE[case.dtype]


def gelu_error(target: GpuTarget | None) -> float:
    """Largest relative error of what a pair makes of gates from -12 to 12."""
    x = np.linspace(-12, 12, 523).astype(np.float32)
    codes, scales = mx.zeros((523, 8), mx.uint32), mx.zeros((523, 1))
    nothing = QuantizedWeight(codes, scales, None, 4, 64, zero=8)
    product = Int4Product((nothing,) * 2, (mx.array(x), mx.ones(523)), activation="gelu_erf")
    (y,) = vector_product(product, mx.zeros((1, 64)), None, target)
    wide = x.astype(np.float64)
    exact = wide * [math.erfc(-value / math.sqrt(2)) / 2 for value in wide]
    return float(np.max(np.abs(np.array(y[0]) - exact)[exact != 0] / np.abs(exact[exact != 0])))


@pytest.mark.parametrize("target", TARGETS[1:])
def test_gelu_is_exact_far_into_its_tail(target: str) -> None:
    assert gelu_error(resolve(target)) < 1e-5


def test_the_tanh_form_is_not_taken_for_gelu() -> None:
    target = mutated("int4_gemv_pair", "activate<ACTIVATION>(value)", "activate<2>(value)")
    assert not gelu_error(target) < 1e-2


def test_weights_of_different_layouts_are_refused() -> None:
    case = CASES[1]
    other = ProductCase(1, (21,), 320, 64).product()
    mixed = case.product()
    mixed = replace(mixed, weights=(mixed.weights[0], other.weights[0]))
    with pytest.raises(ShapeError, match="weights of one layout and K"):
        vector_product(mixed, case.x(), None)


def test_a_residual_of_another_shape_is_refused() -> None:
    case = CASES[7]
    with pytest.raises(ShapeError, match=r"adds a residual \(8, 29\), not \(8, 30\)"):
        vector_product(case.product(), case.x(), mx.zeros((8, 30)))

"""Weights side by side in one array: the same values, in memory once, one argument a launch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import EMULATION, TARGETS, emulated, resolve
from kernels.cases_gpu_int4_product import CASES, ProductCase
from kernels.matrices import quantized, rows
from metal_emu import require_emulator

from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.int4_gemv import vector_product
from turbospark.kernels.gpu.int4_rows import int4_rows
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(mx.reshape(array, (-1,)).view(mx.uint8))


def test_moved_arrays_keep_their_values_wherever_they_are_held() -> None:
    arrays = [
        rows(5, 7),
        rows(3, 11).astype(mx.bfloat16),
        mx.arange(13, dtype=mx.uint8),
        rows(1, 9).astype(mx.float16),
    ]
    mx.eval(arrays)
    held = {"elsewhere": arrays[1]}
    wanted = [bits(array) for array in arrays]
    bundle = Bundle.of(arrays[:3], arrays[3:])
    for array, before in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(bits(array), before)
        place = bundle.place(array)
        assert place is not None
        assert place % 64 == 0  # a launch reads 16 bytes at once, and whole lines
        octets = bits(bundle.words)[4 * place :]
        np.testing.assert_array_equal(octets[: array.nbytes], before)
    base = np.asarray(bundle.words).ctypes.data
    place = bundle.place(held["elsewhere"])
    assert place is not None
    address = np.asarray(held["elsewhere"].view(mx.uint16)).ctypes.data
    assert address == base + 4 * place


def test_moved_arrays_are_in_memory_once() -> None:
    before = mx.get_active_memory()
    array = rows(1024, 1024)
    mx.eval(array)
    alone = mx.get_active_memory() - before
    bundle = Bundle.of([array])
    assert mx.get_active_memory() - before < 1.01 * alone
    assert bundle.place(rows(2, 2)) is None


def test_arrays_listed_twice_lie_there_once() -> None:
    array, other = rows(16, 16), rows(4, 16)
    bundle = Bundle.of([array, array], [other, array])
    assert bundle.words.size == (16 * 16) + 64


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bundled_product_is_the_same_bit_for_bit(case: ProductCase, target: str) -> None:
    gpu = resolve(target)
    product, x, added = case.product(), case.x(), case.added()
    wanted = vector_product(product, x, added, gpu)
    found = vector_product(product.bundled(), x, added, gpu)
    assert all(map(mx.array_equal, found, wanted))


@pytest.mark.parametrize(("residual", "count"), [(False, 2), (True, 3)])
def test_a_launch_takes_what_changes_and_the_bundle(residual: bool, count: int) -> None:
    require_emulator()
    passed: list[list[str]] = []

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        passed.append(names["input_names"])
        return emulated(**names)

    case = ProductCase(2, (37,), 192, residual=residual, norm="norm", bias=(0,))
    target = GpuTarget("counting", "metal.h", build)
    vector_product(case.product().bundled(), case.x(), case.added(), target)
    assert [len(names) for names in passed] == [count]


def test_layers_of_one_layout_share_a_kernel() -> None:
    require_emulator()
    built: list[tuple[object, ...]] = []

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        kernel = emulated(**names)

        def launch(**call: Any) -> Sequence[mx.array]:
            built.append(tuple(call["template"]))
            return kernel(**call)

        return functools.wraps(emulated)(launch)

    target = GpuTarget("counting", "metal.h", build)
    case = ProductCase(1, (37, 21), 192, norm="norm")
    for _ in range(2):
        vector_product(case.product().bundled(), case.x(), None, target)
    assert built[0] == built[1]


def test_a_table_whose_arrays_moved_is_looked_up_as_before() -> None:
    require_emulator()
    table, values = quantized(61, 128, 4, 64)
    Bundle.of([table.codes, table.scales])
    tokens = mx.array([3, 60, 0], mx.int32)
    found = int4_rows(tokens, table, target=EMULATION)
    np.testing.assert_allclose(np.array(found), values[[3, 60, 0]], rtol=1e-5, atol=1e-5)


def test_a_body_is_searched_once_for_what_it_asks_of_its_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[str] = []

    def text(kernel: Kernel) -> str:
        searched.append(kernel.name)
        return "uint n = b_strides[0];"

    def build(**_: Any) -> Callable[..., Sequence[mx.array]]:
        return lambda **call: call["inputs"]

    monkeypatch.setattr(Kernel, "source", property(text))
    body, target = Kernel("searched", ("a", "b", "c"), ("y",)), GpuTarget("any", "metal.h", build)
    launch = functools.partial(
        body, target, [rows(1, 32)] * 3,
        grid=(32, 1, 1), threadgroup=(32, 1, 1), outputs=[((1,), mx.float32)],
    )  # fmt: skip
    assert len(launch(template={"K": 1})) == 2  # a, and b as its strides are asked for
    searched.clear()
    launch(template={"K": 2})
    assert not searched

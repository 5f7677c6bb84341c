"""One case table for the host's matrix products: every instruction set, every activation form."""

import ctypes
import functools
import mmap
import os
import signal
import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernels.matrices import quantized, relative_error, rows

from turbospark.errors import KernelError, ShapeError
from turbospark.kernels.host.cpu import available_isas
from turbospark.kernels.host.target import HostKernels
from turbospark.kernels.quantized_matmul import quantized_matmul_reference
from turbospark.kernels.select import choose_kernels
from turbospark.kernels.weights import QuantizedWeight
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

# bits, group, zero or biases, dtype of scales, N, K: odd N, odd group counts, K beside 64.
CASES = [
    (4, 32, False, mx.float32, 37, 224),
    (5, 32, True, mx.float16, 71, 1056),
    (6, 16, True, mx.float32, 33, 176),
    (8, 32, True, mx.float16, 101, 608),
    (3, 64, False, mx.bfloat16, 1, 192),
    (2, 128, False, mx.float16, 19, 384),
]
SHORT = CASES[:3]
TARGETS = [
    (isa, mode)
    for isa in available_isas()
    for mode in ("exact", "pair", "int8")
    if isa == available_isas()[0] or mode != "int8"
]
PHASES = [Phase.DECODE, Phase.PREFILL]
# float32 sums of up to 1056 products, against double; largest difference over the rms.
TOLERANCE = 1e-5


def cases():
    for isa, mode in TARGETS:
        for case in CASES if isa == available_isas()[0] else SHORT:
            bits, group, *_ = case
            yield pytest.param(isa, mode, case, id=f"{isa}-{mode}-{bits}bit-g{group}")


@functools.cache
def host(isa="auto", mode="exact", threads=2):
    return HostKernels(KernelPolicy(isa=isa, activations=mode, threads=threads))


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    empty = np.empty

    def poisoned(shape, dtype=float):
        array = empty(shape, dtype)
        if array.dtype == np.float32:
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)


def rounded(x, mode):
    """Activations as the integer forms see them: 15 or 8 bits, one scale for 32 values."""
    values = np.array(x)
    if mode == "exact":
        return values.astype(np.float64)
    most = np.float32(127 * 128 if mode == "pair" else 127)
    out = np.zeros(values.shape)
    for k in range(0, values.shape[1], 32):
        span = values[:, k : k + 32]
        largest = np.abs(span).max(1, keepdims=True)
        whole = np.rint(span * (most / largest)).astype(np.float64)
        out[:, k : k + 32] = whole * (largest / most).astype(np.float64)
    return out


def project(kernels, x, weight, phase, bias=None):
    run = kernels.normed_projections(None, [weight], [bias])
    assert run is not None
    return run(x, phase)[0]


@pytest.mark.parametrize(("isa", "mode", "case"), list(cases()))
def test_product_equals_double_of_rounded_activations(isa, mode, case):
    bits, group, zero, dtype, N, K = case
    weight, values = quantized(N, K, bits, group, zero=zero, scale_dtype=dtype)
    x, bias = rows(21, K), rows(1, N, seed=7)[0]
    expected = rounded(x, mode) @ values.T + np.array(bias).astype(np.float64)
    for phase in PHASES:
        together = project(host(isa, mode), x, weight, phase, bias)
        assert relative_error(together, expected) < TOLERANCE
        for first, last in ((0, 1), (20, 21), (3, 10), (1, 18)):
            part = project(host(isa, mode), x[first:last], weight, phase, bias)
            assert mx.array_equal(part, together[first:last])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dense_product_equals_double(isa, dtype):
    weight, x = rows(37, 129, seed=3).astype(dtype), rows(19, 129)
    exact = np.array(weight.astype(mx.float32)).astype(np.float64)
    expected = np.array(x).astype(np.float64) @ exact.T
    for phase in PHASES:
        together = project(host(isa), x, weight, phase)
        assert relative_error(together, expected) < TOLERANCE
        for first, last in ((0, 1), (2, 9), (17, 19)):
            part = project(host(isa), x[first:last], weight, phase)
            assert mx.array_equal(part, together[first:last])


@pytest.mark.parametrize("mode", ["exact", "pair", "int8"])
def test_threads_do_not_change_a_bit(mode):
    bits, group, zero, dtype, N, K = CASES[1]
    weight, _ = quantized(N, K, bits, group, zero=zero, scale_dtype=dtype)
    x = rows(21, K)
    for phase in PHASES:
        one = project(host("auto", mode, 1), x, weight, phase)
        assert mx.array_equal(one, project(host("auto", mode, 3), x, weight, phase))


@pytest.mark.parametrize("mode", ["exact", "pair", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_row_only(mode, bad):
    weight, _ = quantized(37, 224, 4, 32)
    x = np.array(rows(3, 224))
    x[1, 100] = bad
    for phase in PHASES:
        got = np.array(project(host("auto", mode), mx.array(x), weight, phase))
        assert not np.isfinite(got[1]).any()
        assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards pages as Linux does")
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("mode", ["exact", "pair"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking beside threads
def test_nothing_is_read_beyond_the_weight(isa, mode):
    weight, _ = quantized(33, 176, 6, 16, zero=True)
    x = rows(3, 176)
    expected = [project(host(isa, mode), x, weight, phase) for phase in PHASES]
    mx.eval(expected)
    run = host(isa, mode).normed_projections(None, [weight], [None])
    run._matrices.settle()
    native = run._matrices.native[0]
    kept = [guarded(native, "data", weight.codes), guarded(native, "scales", weight.scales)]
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        same = all(
            memoryview(run(x, phase)[0]) == memoryview(want)
            for phase, want in zip(PHASES, expected, strict=True)
        )
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del kept


def guarded(native, field, array):
    """Move an array to the end of a page that is followed by one nobody may read."""
    page = mmap.PAGESIZE
    size = (array.nbytes + page - 1) // page * page
    memory = mmap.mmap(-1, size + page)
    memory[size - array.nbytes : size] = bytes(memoryview(array))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), page, 0) == 0
    setattr(native, field, start + size - array.nbytes)
    return memory


def test_zero_rows_give_zero():
    weight, _ = quantized(37, 224, 4, 32)
    for mode in ("exact", "pair", "int8"):
        for phase in PHASES:
            assert not project(host("auto", mode), mx.zeros((2, 224)), weight, phase).any()


def test_views_and_other_dtypes_are_taken():
    weight, _ = quantized(37, 224, 4, 32)
    wide = rows(448, 5).T
    plain = project(host(), mx.contiguous(wide[:, ::2]), weight, Phase.DECODE)
    assert mx.array_equal(project(host(), wide[:, ::2], weight, Phase.DECODE), plain)
    half = rows(5, 224).astype(mx.float16)
    same = project(host(), half.astype(mx.float32), weight, Phase.DECODE)
    assert mx.array_equal(project(host(), half, weight, Phase.DECODE), same)


def test_weight_views_are_taken():
    weight, _ = quantized(74, 224, 4, 32)
    half = QuantizedWeight(
        weight.codes[::2], weight.scales[::2], weight.biases[::2], weight.bits, weight.group_size
    )
    x = rows(3, 224)
    expected = np.array(quantized_matmul_reference(x, half)).astype(np.float64)
    assert relative_error(project(host(), x, half, Phase.DECODE), expected) < TOLERANCE


def test_inputs_of_another_width_are_refused():
    weight, _ = quantized(37, 224, 4, 32)
    run = host().normed_projections(None, [weight], [None])
    with pytest.raises(ShapeError, match="224"):
        run(rows(2, 192), Phase.DECODE)


def test_mxfp4_is_multiplied_as_the_reference_does():
    codes, scales = mx.quantize(rows(7, 96), group_size=32, bits=4, mode="mxfp4")
    weight = QuantizedWeight(codes, scales, None, 4, 32, mode="mxfp4")
    run = host().normed_projections(None, [weight], [None])
    assert run is not None
    x = rows(3, 96)
    for phase in Phase:
        (got,) = run(x, phase)
        wanted = np.array(quantized_matmul_reference(x, weight))
        assert np.abs(np.array(got) - wanted).max() < 2e-3 * np.abs(wanted).max()


def test_a_zero_code_beside_the_middle_is_left_to_the_reference():
    weight, _ = quantized(7, 96, 5, 32, zero=True)
    assert host().normed_projections(None, [weight], [None]) is not None
    moved = replace(weight, zero=15)
    assert host().normed_projections(None, [moved], [None]) is None


def test_auto_is_the_host_on_a_cpu():
    kernels = choose_kernels(KernelPolicy())
    assert kernels.name == "host"
    best = available_isas()[0]
    assert best in kernels.describe()
    assert ("pair" if best == "avx512" else "exact") in kernels.describe()


def test_an_instruction_set_the_cpu_lacks_is_refused():
    missing = next(isa for isa in ("neon", "avx512") if isa not in available_isas())
    with pytest.raises(KernelError, match=f"isa='{missing}'.*generic"):
        choose_kernels(KernelPolicy(isa=missing))

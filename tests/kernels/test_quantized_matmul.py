import mlx.core as mx
import numpy as np
import pytest
from kernels.matrices import quantized, relative_error, rows

from turbospark.errors import ShapeError
from turbospark.kernels.quantized_matmul import dequantize_reference, quantized_matmul_reference
from turbospark.kernels.weights import BITS, GROUP_SIZES, QuantizedWeight

T, N = 7, 37


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_reference_equals_the_product_in_double(bits, group_size, zero):
    weight, values = quantized(N, 6 * group_size, bits, group_size, zero=zero)
    x = rows(T, weight.shape[1])
    expected = np.array(x).astype(np.float64) @ values.T
    assert relative_error(quantized_matmul_reference(x, weight), expected) < 1e-5
    np.testing.assert_allclose(np.array(dequantize_reference(weight)), values, atol=2e-7)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_rows_equal_one_row_bit_for_bit(bits, group_size):
    weight, _ = quantized(N, 6 * group_size, bits, group_size, zero=True)
    x = rows(T, weight.shape[1])
    together = quantized_matmul_reference(x, weight)
    apart = [quantized_matmul_reference(x[t : t + 1], weight) for t in range(T)]
    assert mx.array_equal(together, mx.concatenate(apart))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dense_rows_equal_one_row_bit_for_bit(dtype):
    weight, x, bias = rows(N, 129, seed=2).astype(dtype), rows(T, 129), rows(1, N, seed=3)[0]
    together = quantized_matmul_reference(x, weight, bias)
    apart = [quantized_matmul_reference(x[t : t + 1], weight, bias) for t in range(T)]
    assert mx.array_equal(together, mx.concatenate(apart))
    exact = np.array(weight.astype(mx.float32)).astype(np.float64)
    expected = np.array(x).astype(np.float64) @ exact.T + np.array(bias)
    assert relative_error(together, expected) < 1e-5
    assert together.dtype == mx.float32


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_scales_keep_float32_arithmetic(dtype):
    weight, values = quantized(N, 96, 4, 32, scale_dtype=dtype)
    x = rows(T, 96)
    expected = np.array(x).astype(np.float64) @ values.T
    assert relative_error(quantized_matmul_reference(x, weight), expected) < 1e-5


def test_mxfp4_rows_equal_its_dequantized_product():
    codes, scales = mx.quantize(rows(N, 96, seed=4), group_size=32, bits=4, mode="mxfp4")
    weight = QuantizedWeight(codes, scales, None, 4, 32, mode="mxfp4")
    x = rows(T, 96)
    values = np.array(dequantize_reference(weight)).astype(np.float64)
    expected = np.array(x).astype(np.float64) @ values.T
    together = quantized_matmul_reference(x, weight)
    assert relative_error(together, expected) < 1e-5
    apart = [quantized_matmul_reference(x[t : t + 1], weight) for t in range(T)]
    assert mx.array_equal(together, mx.concatenate(apart))


def test_stacked_weights_dequantize_matrix_by_matrix():
    first, one = quantized(N, 96, 5, 32, seed=5)
    second, two = quantized(N, 96, 5, 32, seed=6)
    stacked = QuantizedWeight(
        mx.stack([first.codes, second.codes]),
        mx.stack([first.scales, second.scales]),
        mx.stack([first.biases, second.biases]),
        5,
        32,
    )
    values = np.array(dequantize_reference(stacked))
    np.testing.assert_allclose(values, np.stack([one, two]), atol=2e-7)


def test_inner_dimensions_must_agree():
    weight, _ = quantized(N, 96, 4, 32)
    with pytest.raises(ShapeError, match=r"\(7, 64\).*\(37, 96\)"):
        quantized_matmul_reference(rows(T, 64), weight)

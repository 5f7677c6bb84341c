import math

import mlx.core as mx
import numpy as np
import pytest
from kernels.matrices import quantized, rows

from turbospark.errors import KernelError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.embedding import embedding_reference
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.select import choose_kernels
from turbospark.kernels.weights import Norm
from turbospark.settings import KernelPolicy


def test_rms_norm_equals_its_formula_in_double():
    x, weight = rows(5, 97), rows(1, 97, seed=2)[0]
    wide = np.array(x).astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 0.1) * np.array(weight)
    got = rms_norm_reference(x, Norm(weight, 0.1))
    np.testing.assert_allclose(np.array(got), expected, rtol=2e-6, atol=1e-7)


def test_rms_norm_takes_half_precision_weights_and_none():
    x = rows(3, 33).astype(mx.float16)
    plain = rms_norm_reference(x, Norm(None, 1e-6))
    ones = rms_norm_reference(x, Norm(mx.ones((33,), mx.bfloat16), 1e-6))
    assert plain.dtype == mx.float32
    assert mx.array_equal(plain, ones)
    assert mx.array_equal(rms_norm_reference(x, None), x.astype(mx.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_embedding_gives_scaled_rows(bits):
    table, values = quantized(41, 96, bits, 32, zero=bits % 2 == 1)
    tokens = mx.array([40, 0, 7, 7], mx.int32)
    got = np.array(embedding_reference(tokens, table, 2.5))
    np.testing.assert_allclose(got, 2.5 * values[[40, 0, 7, 7]], rtol=1e-6, atol=1e-6)


def test_embedding_takes_a_dense_table():
    table = rows(11, 5).astype(mx.bfloat16)
    got = embedding_reference(mx.array([10, 3], mx.int32), table)
    assert got.dtype == mx.float32
    assert mx.array_equal(got, table[mx.array([10, 3])].astype(mx.float32))


def test_activations_equal_their_formulas_in_double():
    x = np.linspace(-9, 9, 101)
    got = mx.array(x.astype(np.float32))
    silu = x / (1 + np.exp(-x))
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(np.array(activate_reference(got, "silu")), silu, atol=1e-6)
    np.testing.assert_allclose(np.array(activate_reference(got, "gelu_tanh")), gelu, atol=1e-6)
    exact = np.array([0.5 * one * (1 + math.erf(one / math.sqrt(2))) for one in x])
    np.testing.assert_allclose(np.array(activate_reference(got, "gelu_erf")), exact, atol=1e-6)
    assert np.abs(exact - gelu).max() > 4e-4


def test_reference_kernels_have_no_bodies():
    kernels = choose_kernels(KernelPolicy(kernels="reference"))
    assert isinstance(kernels, ReferenceKernels)
    assert kernels.embedding(rows(3, 5), 1.0) is None
    assert kernels.describe().startswith("reference")


@pytest.mark.parametrize(
    "policy",
    [
        KernelPolicy(kernels="metal"),
        KernelPolicy(kernels="cuda"),
        KernelPolicy(kernels="reference", activations="int8"),
        KernelPolicy(kernels="reference", isa="avx2"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused(policy):
    with pytest.raises(KernelError):
        choose_kernels(policy)

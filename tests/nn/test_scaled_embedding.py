"""Gemma's embedding factor is rounded where the table is bfloat16, and only there."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.linear import Embedding
from turbospark.nn.scaled_embedding import ScaledEmbedding, round_to_bfloat16

TOKENS = mx.array([3, 0, 6])


@pytest.mark.parametrize(("dtype", "factor"), [(mx.float32, 640**0.5), (mx.bfloat16, 25.25)])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_factor_follows_the_tables_own_numbers(dtype, factor, quantized):
    rows = mx.random.normal((7, 640), key=mx.random.key(1))
    table = Embedding(7, 640)
    if quantized:
        codes, scales, biases = mx.quantize(rows, 64, 4)
        parts = codes, scales.astype(dtype), biases.astype(dtype)
        table.assign(QuantizedWeight(*parts, bits=4, group_size=64))
    else:
        table.assign(rows.astype(dtype))
    plain = ScaledEmbedding(table, 1)(TOKENS)
    unit = ScaledEmbedding(table, 640)
    unbound = as_float32(unit(TOKENS))
    unit.bind(ReferenceKernels())
    assert np.array_equal(as_float32(unit(TOKENS)), unbound)
    # On a GPU the rows have the table's own type.
    tolerance = 2**-7 if plain.dtype == mx.bfloat16 else 1e-6
    np.testing.assert_allclose(unbound, as_float32(plain) * factor, rtol=tolerance)


def as_float32(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("value", [25.298221281347036, 53.06599664568641, 1.0, 0.1, 3e-5])
def test_rounding_is_that_of_mlx(value):
    assert round_to_bfloat16(value) == mx.array(value).astype(mx.bfloat16).item()


def test_ties_round_to_even():
    assert round_to_bfloat16(1 + 2**-8) == 1.0
    assert round_to_bfloat16(1 + 3 * 2**-8) == 1 + 2**-6

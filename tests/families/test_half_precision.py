"""Checkpoints of 16-bit floats run in float32 on a CPU."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import feed
from golden.tiny import tiny_model
from mlx.utils import tree_map

from turbospark.kernels.reference import ReferenceKernels
from turbospark.nn.unit import bind_units

TOKENS = np.array([3, 41, 5, 60, 17], np.int32)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3"])
def test_a_row_that_overflows_float16_stays_finite(model_type, dtype):
    model = tiny_model(model_type, tie_word_embeddings=False)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = mlp.up_proj.weight.at[2].multiply(30_000.0)
    halves = tree_map(lambda x: x.astype(dtype), model.parameters())
    results = []
    for parameters in (halves, tree_map(lambda x: x.astype(mx.float32), halves)):
        model.update(parameters)
        bind_units(model, ReferenceKernels())
        results.append(feed(model, TOKENS, [5]))
    assert np.isfinite(results[0]).all()
    # Gemma multiplies a bfloat16 table by a rounded factor, which moves every logit a little.
    rounded = model_type == "gemma3_text" and dtype == mx.bfloat16
    np.testing.assert_allclose(results[0], results[1], atol=0.2 if rounded else 1e-5)

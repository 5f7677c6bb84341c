"""The host's default on a CPU with VNNI: activations rounded to 15 bits in quantized products."""

import numpy as np
import pytest
from golden.fixtures import (
    NAMES,
    Golden,
    build_model,
    feed,
    int4_weights,
    load_golden,
    passes,
)
from golden.tiny import TINY, tiny_model
from golden.weights import draw_tokens, draw_weights
from mlx.utils import tree_flatten

from turbospark.errors import KernelError
from turbospark.kernels.select import choose_kernels
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

CONTEXT, SLACK, TOKENS = 64, 5, 40


@pytest.fixture(scope="module", params=["pair", "int8"])
def activations(request):
    return request.param


@pytest.fixture(scope="module")
def kernels(activations):
    try:
        return choose_kernels(KernelPolicy(kernels="host", activations=activations))
    except KernelError as missing:
        pytest.skip(str(missing))


def wide(model_type: str) -> Golden:
    """Heads as wide as real ones, over a window of 7 tokens; no expectations."""
    config = TINY[model_type] | {
        "hidden_size": 192, "intermediate_size": 320, "head_dim": 256,
        "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 320,
    }  # fmt: skip
    shapes = {
        name: list(value.shape)
        for name, value in tree_flatten(tiny_model(model_type, **config).parameters())
    }
    centred = {"centred_norms": True} if model_type == "gemma3_text" else {}
    weights = draw_weights(shapes, 3, **centred)
    config["model_type"] = model_type
    return Golden(f"wide {model_type}", config, config, weights, draw_tokens(TOKENS, 320, 3), {})


WIDE = {f"wide {name}": name for name in ("gemma3_text", "mistral")}


@pytest.fixture(scope="module", params=[*NAMES, *WIDE])
def golden(request):
    return wide(WIDE[request.param]) if request.param in WIDE else load_golden(request.param)


@pytest.fixture(scope="module")
def model(golden, kernels):
    return build_model(golden.config, int4_weights(golden), kernels)


@pytest.fixture(scope="module")
def one_pass(model, golden):
    return feed(model, golden.tokens, [len(golden.tokens)])


def test_one_pass_comes_close_to_transformers(golden, activations, one_pass):
    if not golden.expected or activations == "int8":
        return  # 8 bits are too coarse for random weights
    # Relative to the spread of logits; Gemma 4 amplifies rounding.
    bound = 5e-2 if "gemma4" in golden.name else 5e-3
    assert golden.difference(one_pass, "int4") < bound * one_pass.std()


@pytest.mark.parametrize("size", [1, 3, 7])
def test_chunk_size_changes_no_bit(model, golden, one_pass, size):
    caches = model.make_caches(CONTEXT, SLACK)
    chunked = feed(model, golden.tokens, passes(len(golden.tokens), size), caches=caches)
    np.testing.assert_array_equal(chunked, one_pass)


def test_rows_of_a_verify_equal_stepwise_decode(model, golden):
    runs = []
    for sizes in ([1] * 9, [4, 1, 3, 1]):
        caches = model.make_caches(CONTEXT, SLACK)
        feed(model, golden.tokens[:24], [24], caches=caches)
        runs.append(feed(model, golden.tokens[24:33], sizes, phase=Phase.DECODE, caches=caches))
    np.testing.assert_array_equal(*runs)

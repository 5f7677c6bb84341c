"""The same checkpoints in mlx-lm, where it agrees with transformers.

It ignores the windows of mistral and qwen2 and the biases of gemma3, reads only the older spelling
of RoPE, and ties the head of llama when the configuration is silent; those fixtures are left out.
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, load_golden

pytest.importorskip("mlx_lm")

AGREED = {
    # mlx-lm rounds Gemma 3's embedding factor to bfloat16 whatever the checkpoint's type.
    "gemma3_text": 3e-3,
    "gemma4_dense": 1e-3,
    "gemma4_moe": 1e-3,
    "gemma4_ple": 1e-3,
    "llama2": 1e-4,
    "llama3": 1e-4,
    "mistral": 1e-4,
    "qwen2": 1e-4,
    "qwen3": 1e-4,
    "qwen3_5": 1e-4,
    "qwen3_5_moe": 1e-4,
    "qwen3_5_tied": 1e-3,
}


@pytest.mark.parametrize("name", sorted(AGREED))
def test_logits_agree_with_mlx_lm(name, tmp_path):
    from mlx_lm.utils import load_model

    golden = load_golden(name)
    weights = float_weights(golden)
    (tmp_path / "config.json").write_text(json.dumps(_theirs(golden)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    theirs, _ = load_model(tmp_path)
    expected = np.array(theirs(mx.array(golden.tokens)[None])[0].astype(mx.float32))
    ours = feed(build_model(golden.config, weights), golden.tokens, [len(golden.tokens)])
    assert np.abs(ours - expected).max() < AGREED[name]


def _theirs(golden):
    """The configuration in the words that mlx-lm reads."""
    config = golden.config
    if "qwen3_5" in golden.name:  # it refuses the type of the text model
        return golden.config_v5 | {"model_type": config["model_type"].removesuffix("_text")}
    if "_sliding_window_pattern" in config:
        return config | {"sliding_window_pattern": config["_sliding_window_pattern"]}
    return config

"""The same checkpoints in mlx-lm, where it agrees with transformers.

It ignores the windows of mistral and qwen2 and the biases of gemma3, reads only the older spelling
of RoPE, and ties the head of llama when the configuration is silent; those fixtures are left out.
What it ignores of models with experts is spelled out at the end.
"""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, load_golden
from golden.spellings import alone, apart, sparse_block

pytest.importorskip("mlx_lm")

AGREED = {
    # mlx-lm rounds Gemma 3's embedding factor to bfloat16 whatever the checkpoint's type.
    "gemma3_text": 3e-3,
    "deepseek_v2": 1e-4,
    "deepseek_v2_lite": 1e-4,
    "gemma4_dense": 1e-3,
    "gemma4_moe": 1e-3,
    "gemma4_ple": 1e-3,
    "llama2": 1e-4,
    "llama3": 1e-4,
    "gpt_oss_trunc": 1e-4,
    "mistral": 1e-4,
    "mixtral": 1e-4,
    "muse_glimmer": 1e-4,
    "qwen2": 1e-4,
    "qwen3": 1e-4,
    "qwen3_moe": 1e-4,
    "qwen3_5": 1e-4,
    "qwen3_5_moe": 1e-4,
    "qwen3_5_tied": 1e-3,
    "spark2_5": 1e-4,
    "spark2_5_untied": 1e-4,
}


def without_images(weights):
    return {name: value for name, value in weights.items() if "vision" not in name}


FILES = {
    "mixtral": sparse_block,
    "qwen3_moe": alone,
    "gpt_oss": apart,
    "deepseek_v2": alone,
    "muse": without_images,
}
"""Names as the files of these families have them; mlx-lm does not read transformers' own."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
IGNORED = {
    "mixtral": {"sliding_window": 7},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 7, "rope_scaling": YARN},
    "gpt_oss_trunc": {"rope_scaling": load_golden("gpt_oss").config["rope_scaling"]},
}
"""Keys that change transformers' logits, as the fixtures with such keys show, and not mlx-lm's."""


@pytest.mark.parametrize("name", sorted(AGREED))
def test_logits_agree_with_mlx_lm(name, tmp_path):
    golden = load_golden(name)
    ours = feed(build_model(golden.config, float_weights(golden)), golden.tokens, [40])
    assert np.abs(ours - logits_of_mlx_lm(golden, tmp_path)).max() < AGREED[name]


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_mlx_lm_ignores_what_transformers_honours(name, tmp_path):
    golden = load_golden(name)
    config = golden.config | IGNORED[name]
    theirs = logits_of_mlx_lm(replace(golden, config=config), tmp_path)
    plain, changed = (
        feed(build_model(given, float_weights(golden)), golden.tokens, [40])
        for given in (golden.config, config)
    )
    assert np.abs(plain - theirs).max() < 1e-4
    assert np.abs(changed - theirs).max() > 1e-3


def logits_of_mlx_lm(golden, folder):
    from mlx_lm.utils import load_model

    spelling = next((FILES[kind] for kind in FILES if golden.name.startswith(kind)), dict)
    (folder / "config.json").write_text(json.dumps(_theirs(golden)))
    mx.save_safetensors(str(folder / "model.safetensors"), spelling(float_weights(golden)))
    theirs, _ = load_model(folder)
    return np.array(theirs(mx.array(golden.tokens)[None])[0].astype(mx.float32))


def _theirs(golden):
    """The configuration in the words that mlx-lm reads."""
    config = golden.config
    if "qwen3_5" in golden.name:  # it refuses the type of the text model
        return golden.config_v5 | {"model_type": config["model_type"].removesuffix("_text")}
    if golden.name.startswith("muse"):  # without lists it counts full layers another way
        return golden.config_v5
    if "_sliding_window_pattern" in config:
        return config | {"sliding_window_pattern": config["_sliding_window_pattern"]}
    return config

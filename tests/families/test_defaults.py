"""What an absent key means: transformers' defaults, where other readers differ."""

import numpy as np
import pytest
from golden.tiny import TINY, tiny_model

from turbospark.kernels.rope import rope_frequencies
from turbospark.nn.config import read_config
from turbospark.registry import resolve_family

FULL, SLIDING = "full_attention", "sliding_attention"


def frequencies(model, layer):
    return model.model.layers[layer].self_attn.attend.rotate._rope.inv_freq


def defaults_of(model_type):
    config = resolve_family(model_type).build(TINY[model_type] | {"model_type": model_type}).config
    return read_config(type(config), {})


def test_gemma3_rotates_its_two_kinds_of_layers_with_two_bases():
    model = tiny_model("gemma3_text")
    assert model.config.schedule == (SLIDING, FULL, SLIDING)
    for layer, base in ((0, 1e4), (1, 1e6), (2, 1e4)):
        assert np.array_equal(frequencies(model, layer), rope_frequencies("default", base, 10)[0])


def test_gemma3_scales_linearly_on_full_layers_only():
    model = tiny_model("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0})
    linear = rope_frequencies("linear", 1e6, 10, factor=8.0)[0]
    assert np.array_equal(frequencies(model, 1), linear)
    assert np.array_equal(frequencies(model, 0), rope_frequencies("default", 1e4, 10)[0])


def test_gemma4_rotates_a_quarter_of_full_heads():
    model = tiny_model("gemma4_text")
    full = rope_frequencies("proportional", 1e6, 14, partial_rotary_factor=0.25)[0]
    assert np.count_nonzero(full) == 1
    assert np.array_equal(frequencies(model, 2), full)
    assert np.array_equal(frequencies(model, 0), rope_frequencies("default", 1e4, 10)[0])


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_llama_flow_rotates_with_base_ten_thousand(model_type):
    plain = rope_frequencies("default", 1e4, 10)[0]
    assert np.array_equal(frequencies(tiny_model(model_type), 0), plain)


def test_gemma4_shares_and_widens_nothing_unless_told():
    config = defaults_of("gemma4_text")
    assert config.num_kv_shared_layers == 0
    assert config.use_double_wide_mlp is False
    assert config.final_logit_softcapping is None
    assert config.attention_k_eq_v is False
    full = [plan.index for plan in config.plans() if plan.kind == FULL]
    assert full == [5, 11, 17, 23, 29]
    assert config.plans()[5].heads.head_dim == 512
    assert config.plans()[4].heads.head_dim == 256


def test_gemma4_ends_with_a_full_layer_whatever_the_config_says():
    model = resolve_family("gemma4_text").build(
        TINY["gemma4_text"] | {"layer_types": [SLIDING, FULL, SLIDING] * 2}
    )
    kinds = [plan.kind for plan in model._plans]
    assert kinds == [SLIDING, FULL, SLIDING, SLIDING, FULL, FULL]


@pytest.mark.parametrize(
    ("model_type", "vocab", "eps", "tied", "heads"),
    [
        ("gemma3_text", 262_208, 1e-6, True, (8, 4, 256)),
        ("llama", 32_000, 1e-6, False, (32, 32, 128)),
        ("mistral", 32_000, 1e-6, False, (32, 8, 128)),
        ("qwen2", 151_936, 1e-6, False, (32, 32, 128)),
        ("qwen3", 151_936, 1e-6, False, (32, 32, 128)),
    ],
)
def test_absent_keys_have_the_defaults_of_transformers(model_type, vocab, eps, tied, heads):
    config = defaults_of(model_type)
    assert (config.vocab_size, config.rms_norm_eps) == (vocab, eps)
    assert config.tie_word_embeddings is tied
    found = config.heads
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == heads

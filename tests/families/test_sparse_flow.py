"""What is particular to the llama flow with experts: mixtral and qwen3_moe."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, load_golden
from golden.tiny import TINY, tiny_model

from turbospark.caches.ring import RingCache
from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.experts import route_reference
from turbospark.kernels.rope import rope_frequencies
from turbospark.nn.mlp import MLP
from turbospark.registry import resolve_family


def distance(name, **changes):
    golden = load_golden(name)
    model = build_model(golden.config | changes, float_weights(golden))
    return golden.difference(feed(model, golden.tokens, [len(golden.tokens)]), "full")


def build(model_type, **changes):
    raw = TINY[model_type] | {"model_type": model_type} | changes
    return resolve_family(model_type).build(raw)


def silent(model_type, *keys, **changes):
    raw = {key: value for key, value in TINY[model_type].items() if key not in keys}
    return resolve_family(model_type).build(raw | {"model_type": model_type} | changes)


def is_dense(model):
    return [isinstance(layer.mlp, MLP) for layer in model.model.layers]


def test_weights_are_shares_among_all_experts_unless_made_to_sum_to_one():
    scores = mx.array([[0.0, 2.0, 1.0, -1.0]])
    exponents = np.exp([0.0, 2.0, 1.0, -1.0])
    _, raw = route_reference(scores, 2, renormalise=False)
    np.testing.assert_allclose(np.array(raw)[0], exponents[[1, 2]] / exponents.sum(), rtol=1e-6)
    _, whole = route_reference(scores, 2)
    np.testing.assert_allclose(
        np.array(whole)[0], exponents[[1, 2]] / exponents[[1, 2]].sum(), rtol=1e-6
    )


def test_qwen3_moe_renormalises_only_where_the_config_says_so():
    assert distance("qwen3_moe", norm_topk_prob=False) > 0.05
    assert distance("qwen3_moe_yarn_swa", norm_topk_prob=True) > 0.05
    golden = load_golden("qwen3_moe_yarn_swa")
    config = {key: value for key, value in golden.config.items() if key != "norm_topk_prob"}
    model = build_model(config, float_weights(golden))
    logits = feed(model, golden.tokens, [len(golden.tokens)])
    assert golden.difference(logits, "full") < golden.tolerance


def test_dense_layers_are_those_listed_and_those_between_the_steps():
    assert is_dense(build("qwen3_moe")) == [False, True, False]
    assert is_dense(build("qwen3_moe", mlp_only_layers=None)) == [False] * 3
    assert is_dense(build("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=2)) == [
        True, False, True,
    ]  # fmt: skip
    assert is_dense(build("qwen3_moe", mlp_only_layers=[0], decoder_sparse_step=3)) == [
        True, True, False,
    ]  # fmt: skip
    assert is_dense(build("qwen3_moe", num_experts=0)) == [True] * 3
    assert is_dense(build("mixtral")) == [False, False]


def test_dense_and_routed_layers_have_widths_of_their_own():
    layers = build("qwen3_moe").model.layers
    assert layers[0].mlp.experts.up_proj.value.shape == (7, 11, 24)
    assert layers[1].mlp.up_proj.value.shape == (40, 24)
    assert build("mixtral").model.layers[0].mlp.experts.down_proj.value.shape == (7, 24, 13)


def test_a_window_of_qwen3_moe_is_on_every_layer_and_needs_the_flag():
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    caches = build("qwen3_moe", **windows).make_caches(64, 5)
    assert [type(cache) for cache in caches] == [RingCache] * 3
    assert build("qwen3_moe", sliding_window=7).config.windows == (None,) * 3
    assert distance("qwen3_moe_yarn_swa", use_sliding_window=False) > 0.1


def test_mixtral_has_a_window_only_where_the_config_names_one():
    assert silent("mixtral", "sliding_window").config.windows == (None, None)
    assert build("mixtral").config.windows == (7, 7)
    assert distance("mixtral_swa", sliding_window=None) > 0.1


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_layers_of_two_kinds_are_refused(model_type):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UnsupportedError, match=f"layer_types.*{model_type}"):
        build(model_type, layer_types=kinds)


def test_mixtral_rotates_with_base_a_million_and_qwen3_moe_with_ten_thousand():
    for model_type, base in (("mixtral", 1e6), ("qwen3_moe", 1e4)):
        rope = tiny_model(model_type).model.layers[0].self_attn.attend.rotate._rope
        assert np.array_equal(rope.inv_freq, rope_frequencies("default", base, 10)[0])


def test_yarn_reaches_qwen3_moe():
    assert distance("qwen3_moe_yarn_swa", rope_scaling=None) > 0.1


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_have_two_names_in_configs(model_type):
    names = ("num_experts", "num_local_experts")
    for name in names:
        model = silent(model_type, *names, **{name: 5})
        assert model.model.layers[0].mlp.gate.value.shape == (5, 24)
    with pytest.raises(ConfigError, match="num_experts=5 and num_local_experts=6 disagree"):
        build(model_type, num_experts=5, num_local_experts=6)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_more_experts_a_row_than_there_are_are_refused(model_type):
    with pytest.raises(ConfigError, match="num_experts_per_tok=8 is more than the 7 experts"):
        build(model_type, num_experts_per_tok=8)


def test_absent_keys_have_the_defaults_of_transformers():
    mixtral, qwen = (
        resolve_family(name).build({"model_type": name}).config for name in ("mixtral", "qwen3_moe")
    )
    assert (mixtral.num_local_experts, mixtral.num_experts_per_tok) == (8, 2)
    assert (mixtral.intermediate_size, mixtral.vocab_size) == (14336, 32000)
    assert (mixtral.rms_norm_eps, mixtral.max_position_embeddings) == (1e-5, 131072)
    assert (mixtral.heads.num_kv_heads, mixtral.heads.head_dim) == (8, 128)
    assert (qwen.num_local_experts, qwen.num_experts_per_tok) == (128, 8)
    assert (qwen.moe_intermediate_size, qwen.norm_topk_prob) == (768, False)
    assert (qwen.hidden_size, qwen.num_hidden_layers, qwen.vocab_size) == (2048, 24, 151936)
    assert (qwen.heads.num_kv_heads, qwen.heads.head_dim) == (4, 64)
    assert not qwen.tie_word_embeddings
    assert not mixtral.tie_word_embeddings

"""What is particular to deepseek_v2, and what is easily taken for it."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, load_golden
from golden.tiny import TINY, tiny_model

from turbospark.caches.latent import LatentCache
from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.experts import keep_groups_reference
from turbospark.nn.mlp import MLP
from turbospark.registry import resolve_family

LITE, GROUPED, PLAIN = (
    load_golden(name) for name in ("deepseek_v2_lite", "deepseek_v2", "deepseek_v2_plain")
)
FAMILY = resolve_family("deepseek_v2")
V2_LITE = {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False,
    "moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1,
    "topk_group": 1, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
        "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def build(**changes):
    return FAMILY.build(TINY["deepseek_v2"] | {"model_type": "deepseek_v2"} | changes)


def distance(golden, change=lambda model: None, weights=None, **config):
    """How far logits are from transformers' when something is changed."""
    model = build_model(golden.config | config, float_weights(golden) | (weights or {}))
    change(model)
    return golden.difference(feed(model, golden.tokens, [len(golden.tokens)]), "full")


def attentions(model):
    return [layer.self_attn.attend for layer in model.model.layers]


def experts(model):
    return [layer.mlp.routed for layer in model.model.layers if not isinstance(layer.mlp, MLP)]


def each_rope(**changes):
    def change(model):
        for attend in attentions(model):
            attend._rope = replace(attend._rope, **changes)

    return change


def test_pairs_of_neighbours_rotate():
    assert distance(LITE) < LITE.tolerance
    assert distance(LITE, each_rope(traditional=False)) > 0.05


def test_yarn_leaves_the_rotation_its_size_and_stretches_the_scores():
    model = FAMILY.build(V2_LITE)
    assert attentions(model)[0]._rope.magnitude == 1.0
    growth = 0.1 * 0.707 * math.log(40) + 1
    assert math.isclose(attentions(model)[26]._scale, 192**-0.5 * growth**2)
    assert math.isclose(attentions(model)[26]._scale, 0.11472138679, rel_tol=1e-9)
    assert distance(LITE, each_rope(magnitude=growth)) > 0.01


def test_scores_without_yarn_are_scaled_plainly():
    assert attentions(build())[0]._scale == 17**-0.5
    scaling = V2_LITE["rope_scaling"]
    without = {key: value for key, value in scaling.items() if key != "mscale_all_dim"}
    model = FAMILY.build(V2_LITE | {"rope_scaling": without})
    assert attentions(model)[0]._scale == 192**-0.5

    def plain(model):
        for attend in attentions(model):
            attend._scale = 80**-0.5

    assert distance(LITE, plain) > 0.01


def test_the_table_of_v2_lite_has_its_ramp_between_pairs_10_and_23():
    table = attentions(FAMILY.build(V2_LITE))[0]._rope.inv_freq
    plain = 1e4 ** -(np.arange(0, 64, 2) / 64)
    ratio = plain / table
    assert np.allclose(ratio[:11], 1, rtol=1e-5)
    assert np.allclose(ratio[23:], 40, rtol=1e-5)
    assert (np.diff(ratio[10:24]) > 0).all()


def test_keys_stand_before_values_in_each_head():
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    heads = LITE.weights[name].reshape(3, 48 + 64, 128)
    moved = np.concatenate([heads[:, 48:], heads[:, :48]], axis=1).reshape(-1, 128)
    assert distance(LITE, weights={name: mx.array(moved)}) > 0.05


def test_the_norms_between_two_projections_have_an_epsilon_of_their_own():
    attend = build(rms_norm_eps=0.5).model.layers[0].self_attn
    assert attend.kv_a_layernorm.value.eps == attend.q_a_layernorm.value.eps == 1e-6
    assert build(rms_norm_eps=0.5).model.layers[0].input_layernorm.value.eps == 0.5


def test_experts_of_a_row_come_from_its_best_groups():
    assert distance(GROUPED) < GROUPED.tolerance
    assert distance(GROUPED, topk_method="greedy") > 0.05
    assert distance(GROUPED, n_group=2, topk_group=1) > 0.05
    assert distance(GROUPED, topk_group=4) > 0.05


def test_other_groups_have_no_share_and_the_kept_ones_keep_theirs():
    scores = np.array([[1.0, -3.0, 0.0, 0.9, 2.0, -9.0], [0.0, 0.0, 0.0, 0.0, 5.0, 5.0]])
    kept, share = keep_groups_reference(mx.array(scores), 3, 2)
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = shares.copy()
    wanted[0, 2:4] = wanted[1, 2:4] = 0  # of equal groups the lower one is kept
    np.testing.assert_allclose(np.array(mx.softmax(kept, -1) * share), wanted, atol=1e-7)


def test_weights_are_raw_shares_times_the_factor():
    for golden, factor in ((GROUPED, 4.0), (PLAIN, 2.5), (LITE, 1.0)):
        assert golden.config["routed_scaling_factor"] == factor
        assert distance(golden, routed_scaling_factor=factor * 1.5) > 0.05

    def renormalise(model):
        for unit in experts(model):
            unit._renormalise = True

    assert distance(LITE, renormalise) > 0.05


def test_shared_experts_are_neither_gated_nor_scaled():
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    for golden in (LITE, PLAIN, GROUPED):
        assert distance(golden, weights={name: mx.array(golden.weights[name] / 2)}) > 0.05


def test_dense_layers_come_first():
    def is_dense(**changes):
        return [isinstance(layer.mlp, MLP) for layer in build(**changes).model.layers]

    assert is_dense() == [True, False, False]
    assert is_dense(first_k_dense_replace=0) == [False] * 3
    assert is_dense(first_k_dense_replace=9, num_experts_per_tok=None) == [True] * 3
    layers = build().model.layers
    assert layers[0].mlp.up_proj.value.shape == (40, 24)
    assert layers[1].mlp.shared_experts.up_proj.value.shape == (33, 24)
    assert layers[2].mlp.experts.down_proj.value.shape == (8, 24, 11)


@pytest.mark.parametrize("count", [None, 0])
def test_there_may_be_no_shared_experts(count):
    model = tiny_model("deepseek_v2", n_shared_experts=count)
    assert feed(model, np.arange(5, dtype=np.int32), [5]).shape == (5, 67)
    assert not any("shared" in name for name, _ in model.named_modules())


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("scoring_func", "sigmoid", "softmax"),
        ("norm_topk_prob", True, "ignores it"),
        ("moe_layer_freq", 2, "ignores it"),
        ("topk_method", "noaux_tc", "known: greedy, group_limited_greedy"),
        ("topk_method", None, "known: greedy, group_limited_greedy"),
        ("hidden_act", "gelu", "known"),
        ("num_key_value_heads", 3, "every one of the 6 query heads"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(key, value, why):
    with pytest.raises(UnsupportedError, match=rf"{key}={value!r}.*{why}"):
        build(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts"),
        ({"num_experts_per_tok": 9, "topk_method": "greedy"}, "more than the 8 experts"),
        ({"n_group": None}, "n_group=None and topk_group=2"),
        ({"n_group": 3}, "n_group=3 and topk_group=2 do not divide 8 experts"),
        ({"topk_group": 5}, "n_group=4 and topk_group=5"),
        ({"num_experts": 7}, "num_experts=7 and n_routed_experts=8 disagree"),
        ({"qk_rope_head_dim": 9}, "head_dim=9 is odd"),
        ({"v_head_dim": 2**23}, "too wide to be real"),
        ({"kv_lora_rank": None}, "kv_lora_rank=None must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_experts_have_two_names_in_configs():
    raw = {key: value for key, value in TINY["deepseek_v2"].items() if key != "n_routed_experts"}
    assert FAMILY.build(raw | {"num_experts": 12}).config.n_routed_experts == 12


def test_absent_keys_have_the_defaults_of_transformers():
    config = FAMILY.build({"num_experts_per_tok": 6}).config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (102400, 4096, 32)
    assert (config.intermediate_size, config.moe_intermediate_size) == (11008, 1407)
    assert (config.q_lora_rank, config.kv_lora_rank) == (1536, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.n_routed_experts, config.n_shared_experts) == (64, 2)
    assert (config.first_k_dense_replace, config.routed_scaling_factor) == (0, 1.0)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (2048, 1e-6)
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert config.groups is None


def test_v2_lite_caches_576_numbers_a_token_and_layer():
    caches = FAMILY.build(V2_LITE).make_caches(4096, 128)
    assert [type(cache) for cache in caches] == [LatentCache] * 27
    assert {cache.head_dim + cache.value_dim for cache in caches} == {576}
    assert {cache.rewind_bound for cache in caches} == {None}

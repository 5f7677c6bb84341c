"""What is particular to spark2_5, and what is easily taken for it."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, int4_weights, load_golden
from golden.tiny import TINY, tiny_model

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import CheckpointError, ConfigError, UnsupportedError
from turbospark.kernels.rope import rope_frequencies
from turbospark.protocols import Phase
from turbospark.registry import resolve_family

GOLDEN = load_golden("spark2_5")
UNTIED = load_golden("spark2_5_untied")
FAMILY = resolve_family("spark2_5")
FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = GOLDEN.config["rope_parameters"]


def distance(config=None, golden=GOLDEN, **changes):
    """How far logits are from the reference's when a value or some tensors are replaced."""
    model = build_model(config or golden.config, float_weights(golden) | changes)
    return golden.difference(feed(model, golden.tokens, [len(golden.tokens)]), "full")


def replaced(ending, change):
    return {
        name: mx.array(change(value))
        for name, value in GOLDEN.weights.items()
        if name.endswith(ending)
    }


def build(**changes):
    return FAMILY.build(TINY["spark2_5"] | {"model_type": "spark2_5"} | changes)


def frequencies(model, layer):
    return model.model.layers[layer].self_attn.attend.rotate._rope.inv_freq


def test_the_activation_is_gelu_and_not_its_tanh_form():
    model = build_model(GOLDEN.config, float_weights(GOLDEN))
    for layer in model.model.layers:
        layer.mlp.step.activation = "gelu_tanh"
    moved = GOLDEN.difference(feed(model, GOLDEN.tokens, [40]), "full")
    assert moved > 20 * GOLDEN.tolerance


def test_each_kind_of_layer_rotates_by_its_own_entry():
    swapped = GOLDEN.config | {"rope_parameters": {FULL: ROPES[SLIDING], SLIDING: ROPES[FULL]}}
    assert distance() < GOLDEN.tolerance
    assert distance(swapped) > 0.5
    model = tiny_model("spark2_5")
    assert np.array_equal(frequencies(model, 0), rope_frequencies("default", 1e4, 10)[0])
    assert np.array_equal(frequencies(model, 3), rope_frequencies("default", 5e6, 4)[0])


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [(FULL, "rope_theta", 1e4), (FULL, "partial_rotary_factor", 1.0), (SLIDING, "rope_theta", 5e6),
     (SLIDING, "partial_rotary_factor", 0.25)],
)  # fmt: skip
def test_every_number_of_rope_counts(kind, key, value):
    changed = ROPES | {kind: ROPES[kind] | {key: value}}
    assert distance(GOLDEN.config | {"rope_parameters": changed}) > 0.05


def test_a_kind_of_layer_without_rope_is_named():
    with pytest.raises(ConfigError, match="rope_parameters lacks sliding_attention"):
        build(rope_parameters={FULL: {"rope_theta": 5e6}})
    only_full = {"layer_types": [FULL] * 4, "rope_parameters": {FULL: {"rope_theta": 5e6}}}
    assert build(**only_full).config.windows == (None,) * 4
    raw = {key: value for key, value in TINY["spark2_5"].items() if key != "rope_parameters"}
    with pytest.raises(ConfigError, match="lacks rope_parameters"):
        FAMILY.build(raw | {"model_type": "spark2_5"})


def test_three_layers_with_a_window_come_before_a_full_one():
    assert "layer_types" not in GOLDEN.config
    model = build_model(GOLDEN.config, float_weights(GOLDEN))
    kinds = [type(cache) for cache in model.make_caches(64, 5)]
    assert kinds == [RingCache, RingCache, RingCache, KVCache, RingCache]
    backwards = [FULL if i == 0 else SLIDING for i in range(5)]
    assert distance(GOLDEN.config | {"layer_types": backwards}) > 0.5
    turned = [SLIDING, FULL, SLIDING]
    assert distance(UNTIED.config | {"layer_types": turned}, UNTIED) > 0.1


def test_a_gate_is_one_number_a_head_and_a_sigmoid():
    assert distance(**replaced("g_proj.weight", lambda rows: rows[::-1].copy())) > 0.1
    assert distance(**replaced("g_proj.weight", np.zeros_like)) > 0.1
    model = tiny_model("spark2_5", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    gates = np.array([0.0, 2.0, -1.0, 0.5, 1.0, 3.0], np.float32)
    attention.g_proj.assign(mx.array(np.repeat(gates[:, None], 24, axis=1) / 24))
    model.model.layers[0].input_layernorm.weight = mx.ones((24,))
    h = mx.ones((1, 24))
    cache = KVCache(2, 10, 64)
    attended = np.array(attention(h, cache, Phase.PREFILL))[0]  # [Hq * D]
    value = np.array(attention.v_proj.value).sum(axis=1)  # [Hkv * D], of a single row
    shares = 1 / (1 + np.exp(-gates))
    np.testing.assert_allclose(attended[:10], value[:10] * shares[0], rtol=1e-4)
    np.testing.assert_allclose(attended[10:20], value[:10] * shares[1], rtol=1e-4)
    np.testing.assert_allclose(attended[50:], value[10:] * shares[5], rtol=1e-4)


def test_queries_keys_and_values_lie_in_this_order():
    def turned(rows):  # values before keys
        return np.concatenate([rows[:384], rows[512:], rows[384:512]])

    assert distance(**replaced("q_k_v_proj.weight", turned)) > 0.5


@pytest.mark.parametrize("kind", ["full", "int4"])
def test_names_of_conversions_are_one_model(kind):
    weights = {"full": float_weights, "int4": int4_weights}[kind](UNTIED)
    renamed = {
        name.replace("model.embedding.", "model.embed_tokens.").replace("out_proj", "o_proj"): value
        for name, value in weights.items()
    }
    assert renamed.keys() != weights.keys()
    for given in (renamed, weights, build_model(UNTIED.config, weights).sanitize(renamed)):
        logits = feed(build_model(UNTIED.config, given), UNTIED.tokens, [40])
        assert UNTIED.difference(logits, kind) < UNTIED.tolerance


def test_rows_of_another_number_of_heads_are_named():
    name = "model.layers.2.self_attn.q_k_v_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name} has 99 rows, where .* have 100"):
        build().sanitize({name: mx.zeros((99, 24))})


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu_pytorch_tanh"), ("hidden_act", "silu"), ("gate_attn_act_mode", "tanh"),
     ("headwise_attn_output_gate", False), ("attention_bias", True), ("mlp_bias", True),
     ("rope_scaling", {"type": "linear", "factor": 2.0})],
)  # fmt: skip
def test_what_no_release_has_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedError, match=key):
        build(**{key: value})


def test_the_head_is_the_table_unless_the_config_says_otherwise():
    assert "lm_head" not in build()
    assert "lm_head" in build(tie_word_embeddings=False)
    assert build().sanitize({"lm_head.weight": mx.zeros((67, 24))}) == {}


@pytest.mark.parametrize("key", ["head_dim", "sliding_window", "hidden_size"])
def test_a_size_that_is_missing_is_named(key):
    raw = {name: value for name, value in TINY["spark2_5"].items() if name != key}
    with pytest.raises(ConfigError, match=f"lacks {key}"):
        FAMILY.build(raw | {"model_type": "spark2_5"})

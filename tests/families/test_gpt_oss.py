"""What is particular to gpt_oss, and what is easily taken for it."""

import math

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, load_golden
from golden.tiny import TINY, tiny_model

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import CheckpointError, ConfigError, UnsupportedError
from turbospark.kernels.activations import gated_reference
from turbospark.kernels.weights import ClampedSwiGLU
from turbospark.registry import resolve_family

GOLDEN = load_golden("gpt_oss")
FLOORED = load_golden("gpt_oss_trunc")
FAMILY = resolve_family("gpt_oss")


def distance(config=None, **changes):
    """How far logits are from transformers' when some tensors are replaced."""
    model = build_model(config or GOLDEN.config, float_weights(GOLDEN) | changes)
    return GOLDEN.difference(feed(model, GOLDEN.tokens, [len(GOLDEN.tokens)]), "full")


def replaced(ending, change):
    return {
        name: mx.array(change(value))
        for name, value in GOLDEN.weights.items()
        if name.endswith(ending)
    }


def rope_of(config):
    return FAMILY.build(config).model.layers[0].self_attn.attend.rotate._rope


def test_the_ramp_of_yarn_is_not_rounded_to_whole_pairs():
    rope = rope_of({"model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": 4})
    plain = 150_000.0 ** (-np.arange(32) / 32)
    ramp = np.clip((np.arange(32) - 8.0928) / (17.3980 - 8.0928), 0, 1)
    np.testing.assert_allclose(rope.inv_freq, plain * (1 - ramp + ramp / 32), rtol=1e-3)
    assert rope.magnitude == pytest.approx(0.1 * math.log(32) + 1)


def test_rounding_the_ramp_moves_logits():
    scaling = GOLDEN.config["rope_scaling"]
    assert scaling["truncate"] is False
    rounded = GOLDEN.config | {"rope_scaling": scaling | {"truncate": True}}
    assert distance(rounded) > 10 * GOLDEN.tolerance


def test_a_ramp_of_unknown_rounding_is_rounded():
    scaling = {key: value for key, value in FLOORED.config["rope_scaling"].items()
               if key != "truncate"}  # fmt: skip
    model = build_model(FLOORED.config | {"rope_scaling": scaling}, float_weights(FLOORED))
    logits = feed(model, FLOORED.tokens, [len(FLOORED.tokens)])
    assert FLOORED.difference(logits, "full") < FLOORED.tolerance


def test_a_config_silent_on_rope_means_the_released_one():
    names = ("rope_theta", "rope_scaling", "rope_parameters")
    silent = {key: value for key, value in GOLDEN.config.items() if key not in names}
    assert distance(silent) < GOLDEN.tolerance
    assert distance(silent | {"rope_theta": 150_000.0}) < GOLDEN.tolerance
    assert distance(silent | {"rope_theta": 10_000.0}) > 0.1


def test_sinks_belong_to_query_heads_and_are_not_scaled():
    assert distance(**replaced("sinks", lambda sinks: sinks[::-1].copy())) > 0.05
    assert distance(**replaced("sinks", lambda sinks: sinks / 8)) > 0.05
    assert distance(**replaced("sinks", lambda sinks: sinks - 100)) > 0.05


def test_a_sink_takes_weight_and_adds_no_value():
    model = tiny_model("gpt_oss", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    q = mx.zeros((1, 6, 10))  # every score is 0
    attention.sinks.weight = mx.log(mx.array([1.0, 3.0, 5.0, 7.0, 9.0, 11.0]))
    cache = KVCache(2, 10, 64)
    v = mx.array(np.random.default_rng(1).normal(size=(1, 2, 10)), mx.float32)
    cache.append(mx.zeros((1, 2, 10)), v)
    out = np.array(attention.attend.attend.reference(q, cache, None)).reshape(6, 10)
    for head, total in enumerate((2.0, 4.0, 6.0, 8.0, 10.0, 12.0)):
        np.testing.assert_allclose(out[head], np.array(v)[0, head // 3] / total, rtol=1e-5)


def test_experts_gates_are_clamped_on_one_side_and_up_on_both():
    gate = np.array([-9.0, -0.5, 2.0, 7.5, 9.0, 6.0])
    up = np.array([1.0, -9.0, 0.5, 8.0, -7.5, 6.5])
    got = gated_reference(mx.array(gate), mx.array(up), ClampedSwiGLU(1.702, 7.0))
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    expected = (u + 1) * g / (1 + np.exp(-1.702 * g))
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-5)


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_the_gates_numbers_come_from_the_config(key, value):
    assert distance(GOLDEN.config | {key: value}) > 0.05
    silent = {name: given for name, given in GOLDEN.config.items() if name != key}
    assert distance(silent) < GOLDEN.tolerance


def test_rows_of_gate_and_up_alternate():
    def halved(matrix):
        return np.concatenate([matrix[..., ::2], matrix[..., 1::2]], axis=-1)

    assert distance(**replaced("gate_up_proj", halved), **replaced("up_proj_bias", halved)) > 0.5


@pytest.mark.parametrize(
    "ending",
    ["router.bias", "gate_up_proj_bias", "down_proj_bias", "q_proj.bias", "o_proj.bias"],
)
def test_every_bias_counts(ending):
    assert distance(**replaced(ending, np.zeros_like)) > 0.02


def test_the_first_layer_sees_a_window_and_the_second_everything():
    silent = {key: value for key, value in GOLDEN.config.items() if key != "layer_types"}
    assert distance(silent) < GOLDEN.tolerance
    caches = FAMILY.build(silent).make_caches(64, 5)
    assert [type(cache) for cache in caches] == [RingCache, KVCache, RingCache]
    turned = ["full_attention", "sliding_attention", "full_attention"]
    assert distance(GOLDEN.config | {"layer_types": turned}) > 0.1


def test_absent_keys_have_the_defaults_of_transformers():
    config = FAMILY.build({"model_type": "gpt_oss"}).config
    assert (config.num_hidden_layers, config.num_local_experts) == (36, 128)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (2880, 2880, 201088)
    assert (config.num_experts_per_tok, config.sliding_window) == (4, 128)
    assert (config.swiglu_alpha, config.swiglu_limit, config.rms_norm_eps) == (1.702, 7.0, 1e-5)
    assert config.attention_bias
    assert not config.tie_word_embeddings
    heads = config.heads
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (64, 8, 64)


def build(**changes):
    return FAMILY.build(TINY["gpt_oss"] | {"model_type": "gpt_oss"} | changes)


def test_experts_have_two_names_in_configs():
    both = build(num_experts=7, num_local_experts=7)
    assert both.model.layers[0].mlp.router.value.shape == (7, 24)
    with pytest.raises(ConfigError, match="num_experts=8 and num_local_experts=7 disagree"):
        build(num_experts=8)


def test_what_is_not_implemented_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="hidden_act='gelu'"):
        build(hidden_act="gelu")
    with pytest.raises(ConfigError, match="num_experts_per_tok=8 is more than the 7 experts"):
        build(num_experts_per_tok=8)
    with pytest.raises(ConfigError, match="sliding_window=None"):
        build(sliding_window=None)


def test_experts_of_an_odd_number_of_rows_are_named():
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=f"{name} has 5 rows"):
        build().sanitize({name: mx.zeros((7, 24, 5))})


def test_blocks_of_another_type_are_named():
    stem = "model.layers.0.mlp.experts.down_proj"
    weights = {f"{stem}_blocks": mx.zeros((7, 32, 1, 16), mx.int8),
               f"{stem}_scales": mx.zeros((7, 32, 1), mx.uint8)}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"down_proj_blocks.*not both uint8"):
        build().sanitize(weights)

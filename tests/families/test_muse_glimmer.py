"""What is particular to muse_glimmer, and what is easily taken for it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, load_golden
from golden.tiny import TINY, tiny_model

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import ConfigError, UnsupportedError
from turbospark.protocols import Phase
from turbospark.registry import resolve_family

GOLDEN = load_golden("muse_glimmer")
LISTS = load_golden("muse_glimmer_lists")
FAMILY = resolve_family("muse_glimmer")
FULL, SLIDING = "full_attention", "sliding_attention"


def text(golden=GOLDEN, **changes):
    """A fixture's configuration with changes in its text part."""
    return golden.config_v5 | {"text_config": golden.config_v5["text_config"] | changes}


def distance(config, golden=GOLDEN, **changes):
    """How far logits are from transformers' when a value or some tensors are replaced."""
    model = build_model(config, float_weights(golden) | changes)
    return golden.difference(feed(model, golden.tokens, [len(golden.tokens)]), "full")


def build(**changes):
    return FAMILY.build(TINY["muse_glimmer"] | {"model_type": "muse_glimmer"} | changes)


def is_still(layer):
    return not layer.self_attn.attend.rotate._rope.inv_freq.any()


def test_the_norms_behind_attention_and_mlp_have_an_epsilon_of_their_own():
    eps, post = (GOLDEN.config_v5["text_config"][key] for key in ("rms_norm_eps", "post_norm_eps"))
    assert distance(text()) < GOLDEN.tolerance
    assert distance(text(post_norm_eps=eps)) > 0.05
    assert distance(text(rms_norm_eps=post)) > 0.05


def test_without_lists_every_fourth_layer_from_the_last_is_full_and_still():
    silent = GOLDEN.config["text_config"]
    assert not {"layer_types", "layer_rope_theta"} & set(silent)
    model = build_model(GOLDEN.config, float_weights(GOLDEN))
    caches = model.make_caches(64, 5)
    assert [type(cache) is KVCache for cache in caches] == [i in (2, 6) for i in range(7)]
    assert [is_still(layer) for layer in model.model.layers] == [i in (2, 6) for i in range(7)]
    forward = [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(7)]
    assert distance(text(layer_types=forward)) > 0.1


def test_windows_and_rotation_are_listed_apart():
    model = build_model(LISTS.config, float_weights(LISTS))
    layers, caches = model.model.layers, model.make_caches(64, 5)
    assert [is_still(layer) for layer in layers] == [False, True, False, False, True]
    assert [type(cache) for cache in caches] == [KVCache, *[RingCache] * 3, KVCache]
    assert distance(text(LISTS), LISTS) < LISTS.tolerance
    assert distance(text(LISTS, layer_types=[FULL] * 5), LISTS) > 0.05
    assert distance(text(LISTS, layer_rope_theta=[20_000.0] * 5), LISTS) > 0.05


def test_full_layers_know_no_positions():
    assert distance(text(layer_rope_theta=[20_000.0] * 7)) > 0.05
    model = build(num_hidden_layers=1)
    tokens = mx.array([5, 9, 5, 9, 11], mx.int32)
    swapped = mx.array([9, 5, 9, 5, 11], mx.int32)
    one, other = (
        np.array(model(ids, model.make_caches(64, 5), phase=Phase.PREFILL).logits)
        for ids in (tokens, swapped)
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_layer_with_a_base_of_its_own_is_refused():
    with pytest.raises(UnsupportedError, match=r"layer_rope_theta\[2\]=500.0 beside rope_theta"):
        build(layer_rope_theta=[1e4, 0, 500.0, 0, 1e4])
    with pytest.raises(ConfigError, match="layer_rope_theta lists 2 layers"):
        build(layer_rope_theta=[1e4, 0])
    bases = [5e5, 0, 0, 5e5, 0]
    model = build(layer_rope_theta=bases, rope_parameters={"rope_theta": 5e5})
    assert [is_still(layer) for layer in model.model.layers] == [base == 0 for base in bases]
    assert build(layer_rope_theta=bases, rope_theta=5e5).num_layers == 5


def test_rows_of_the_table_are_normed_without_weights():
    model = build_model(text(), float_weights(GOLDEN))
    rows = np.array(model.embed(mx.array(GOLDEN.tokens)))
    table = GOLDEN.weights["model.language_model.embed_tokens.weight"][GOLDEN.tokens]
    expected = table / np.sqrt((table**2).mean(axis=1, keepdims=True) + 0.02)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)


def test_logits_are_multiplied_and_then_capped():
    model = tiny_model("muse_glimmer")
    out = model(mx.array([3, 8, 4]), model.make_caches(64, 5), phase=Phase.PREFILL, hidden=True,
                logits="all")  # fmt: skip
    plain = np.array(out.hidden @ model.lm_head.value.T)
    np.testing.assert_allclose(np.array(out.logits), 2 * np.tanh(plain * 0.5 / 2), atol=1e-5)
    assert distance(text(output_multiplier=1.0, final_logit_softcapping=4.0)) > 0.1


@pytest.mark.parametrize(
    ("key", "value"),
    [("qk_scale_factor", 1.0), ("output_multiplier", 0.25), ("final_logit_softcapping", 20.0)],
)
def test_factors_come_from_the_config(key, value):
    assert distance(text(**{key: value})) > 0.05


@pytest.mark.parametrize(
    "leaf",
    ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
     "post_feedforward_layernorm", "language_model.norm", "self_attn.gate_proj"],
)  # fmt: skip
def test_every_norm_and_gate_counts(leaf):
    changes = {
        name: mx.array(np.zeros_like(value))
        for name, value in GOLDEN.weights.items()
        if name.endswith(f"{leaf}.weight")
    }
    assert len(changes) == (1 if "language" in leaf else 7)
    assert distance(text(), **changes) > 0.05


def test_biases_are_of_attention_but_not_of_its_gate():
    names = {name for name in LISTS.weights if name.endswith(".bias") and "language" in name}
    assert len(names) == 5 * 4
    zeros = {name: mx.zeros(LISTS.weights[name].shape) for name in names}
    assert distance(text(LISTS), LISTS, **zeros) > 0.05


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_names_of_every_exporter_are_one_model(prefix):
    weights = {}
    for name, value in float_weights(GOLDEN).items():
        if prefix == "language_model.model." and name.startswith("lm_head"):
            name = f"language_model.{name}"
        weights[name.replace("model.language_model.", prefix)] = value
    model = build_model(text(), weights)
    logits = feed(model, GOLDEN.tokens, [len(GOLDEN.tokens)])
    assert GOLDEN.difference(logits, "full") < GOLDEN.tolerance


@pytest.mark.parametrize("prefix", ["", "model.", "language_model."])
def test_what_belongs_to_images_is_left_out(prefix):
    names = ["vision_tower.layers.0.attn.proj.weight", "vision_adapter.fc1.weight",
             "vision_projection.weight"]  # fmt: skip
    weights = {prefix + name: mx.zeros((2,)) for name in names}
    assert build().sanitize(weights) == {}
    assert sum("vision" in name for name in GOLDEN.weights) > 10


def test_a_text_model_alone_has_a_type_of_its_own():
    config = GOLDEN.config_v5["text_config"]
    assert config["model_type"] == "muse_glimmer_text"
    assert distance(config) < GOLDEN.tolerance


def test_absent_keys_have_the_defaults_of_transformers():
    config = FAMILY.build({"model_type": "muse_glimmer", "num_hidden_layers": 1}).config
    heads = config.heads
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (32, 2, 128)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (
        6656,
        19968,
        202048,
    )
    assert (config.sliding_window, config.max_position_embeddings) == (2048, 131072)
    assert (config.rms_norm_eps, config.post_norm_eps) == (1e-5, 1e-8)
    assert config.qk_scale_factor == 3.87
    assert config.output_multiplier == pytest.approx(26**-0.5)
    assert config.final_logit_softcapping == 20
    assert not config.tie_word_embeddings


def test_mlx_lm_counts_full_layers_from_the_first_where_none_are_listed(tmp_path):
    pytest.importorskip("mlx_lm")
    from mlx_lm.utils import load_model

    weights = {name: value for name, value in float_weights(GOLDEN).items() if "vision" not in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    found = []
    for config in (GOLDEN.config, GOLDEN.config_v5):
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs, _ = load_model(tmp_path)
        logits = np.array(theirs(mx.array(GOLDEN.tokens)[None])[0].astype(mx.float32))
        found.append(GOLDEN.difference(logits, "full"))
    assert found[0] > 0.1  # transformers counts back from the last
    assert found[1] < GOLDEN.tolerance

"""Qwen 3.5: what its checkpoints look like, and what is refused of them."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import (
    build_model,
    feed,
    float_weights,
    int4_weights,
    kernel_sets,
    load_golden,
)
from golden.tiny import TINY, tiny_model

from turbospark.errors import CheckpointError, ConfigError, UnsupportedError
from turbospark.kernels.rope import rope_frequencies
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.quantize import QUANTIZATIONS, quantization_for
from turbospark.nn.weights import split_heads, stack_matrices
from turbospark.registry import resolve_family

KERNELS = kernel_sets()
OFFSETS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
           "q_norm.weight", "k_norm.weight")  # fmt: skip
HEAD_LAYERS = {
    "mtp.fc.weight": mx.zeros((128, 256)),
    "mtp.norm.weight": mx.zeros((128,)),
    "mtp.layers.0.self_attn.q_proj.weight": mx.zeros((512, 128)),
    "mtp.layers.0.input_layernorm.weight": mx.zeros((128,)),
}


def published(weights):
    """Names of the releases, which are wrapped with a vision tower."""
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}"
        if name.startswith("model.")
        else name: value
        for name, value in weights.items()
    }
    return renamed | {"model.visual.blocks.0.norm1.weight": mx.zeros((3,))}


def converted(weights):
    """Names and values of MLX conversions: filters turned, norms baked, experts apart."""
    found = {"vision_tower.blocks.0.norm1.weight": mx.zeros((3,))}
    for name, value in weights.items():
        if name.endswith("conv1d.weight"):
            value = value.swapaxes(1, 2)
        elif name.endswith(OFFSETS):
            value = value + 1
        if name.endswith("experts.gate_up_proj"):
            gate, up = mx.split(value, 2, axis=1)
            stem = name.replace("experts.gate_up_proj", "switch_mlp")
            found[f"language_model.{stem}.gate_proj.weight"] = gate
            found[f"language_model.{stem}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            stem = name.replace("experts.down_proj", "switch_mlp")
            found[f"language_model.{stem}.down_proj.weight"] = value
        else:
            found[f"language_model.{name}"] = value
    return found


def saved_again(weights):
    """What transformers' own `save_pretrained` makes of stacked experts."""
    found = {}
    for name, value in weights.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = value
            continue
        parts = {"down_proj": value}
        if leaf == "gate_up_proj":
            gate, up = mx.split(value, 2, axis=1)
            parts = {"gate_proj": gate, "up_proj": up}
        for part, stacked in parts.items():
            for i in range(stacked.shape[0]):
                found[f"{stem}.{i}.{part}.weight"] = stacked[i]
    return found


@pytest.mark.parametrize("spelling", [published, converted, saved_again])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_every_exporter_s_names_give_the_same_model(name, spelling):
    golden = load_golden(name)
    weights = float_weights(golden)
    tokens = golden.tokens[:9]
    own, other = (build_model(golden.config, w) for w in (weights, spelling(weights)))
    assert np.array_equal(feed(own, tokens, [9]), feed(other, tokens, [9]))


@pytest.mark.parametrize("spelling", [published, converted, saved_again])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_5_tied"])
def test_the_one_is_added_to_norms_once_however_often_names_are_settled(name, spelling):
    golden = load_golden(name)
    model = resolve_family(name.removesuffix("_tied")).build(golden.config)
    weights = spelling(float_weights(golden)) | HEAD_LAYERS  # which must not count as raw
    once = model.sanitize(weights)
    twice = model.sanitize(once)
    assert once.keys() == twice.keys()
    assert all(once[key] is twice[key] for key in once)
    norm = "model.layers.3.self_attn.q_norm.weight"
    np.testing.assert_array_equal(np.array(once[norm]), golden.weights[norm] + 1)
    plain = "model.layers.0.linear_attn.norm.weight"
    np.testing.assert_array_equal(np.array(once[plain]), golden.weights[plain])


def test_norms_of_half_precision_keep_their_small_offsets():
    golden = load_golden("qwen3_5")
    model = resolve_family("qwen3_5").build(golden.config)
    weights = float_weights(golden) | {"model.norm.weight": mx.full((128,), 0.001, mx.bfloat16)}
    norm = model.sanitize(weights)["model.norm.weight"]
    assert norm.dtype == mx.float32
    assert abs(norm[0].item() - 1.001) < 1e-5


@pytest.mark.parametrize("announced", [0, 1])
@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("prefix", ["", "model.", "language_model."])
def test_a_trunk_loads_with_and_without_its_prediction_layers(announced, present, prefix):
    golden = load_golden("qwen3_5")
    weights = float_weights(golden)
    if present:
        weights |= {prefix + name: value for name, value in HEAD_LAYERS.items()}
    model = build_model(golden.config | {"mtp_num_hidden_layers": announced}, weights)
    logits = feed(model, golden.tokens[:9], [9])
    assert np.array_equal(logits, feed(build_model(golden.config, float_weights(golden)),
                                       golden.tokens[:9], [9]))  # fmt: skip


@pytest.mark.parametrize("kernels", sorted(KERNELS))
def test_a_head_may_have_other_bits_than_the_body(kernels):
    golden = load_golden("qwen3_5")
    body, head = int4_weights(golden), mx.array(golden.weights["lm_head.weight"])
    eight = QuantizedWeight(*mx.quantize(head, group_size=32, bits=8), bits=8, group_size=32)
    logits = [
        feed(build_model(golden.config, body | {"lm_head.weight": w}, KERNELS[kernels]),
             golden.tokens[:9], [9])
        for w in (eight, head)
    ]  # fmt: skip
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.1


def test_routers_keep_eight_bits():
    for leaf in ("mlp.gate", "mlp.shared_expert_gate"):
        chosen = quantization_for(f"model.layers.1.{leaf}", 128, QUANTIZATIONS["int4"])
        assert chosen is not None
        assert chosen.bits == 8
    assert quantization_for("model.layers.1.mlp.gate_proj", 128, QUANTIZATIONS["int4"]).bits == 4


def test_an_incomplete_set_of_experts_is_reported():
    golden = load_golden("qwen3_5_moe")
    weights = saved_again(float_weights(golden))
    del weights["model.layers.2.mlp.experts.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"expert 5 of layer 2.*experts\.5\.up_proj\.weight"):
        build_model(golden.config, weights)


def test_experts_of_unlike_layouts_are_refused():
    with pytest.raises(CheckpointError, match="matrices of x differ"):
        stack_matrices("x", [mx.zeros((4, 8)), mx.zeros((4, 8), mx.bfloat16)])


def test_queries_and_gates_lie_head_by_head():
    weight = mx.arange(12)[:, None] * mx.ones((1, 5))
    q, gate = split_heads("q_proj", weight, 2)
    assert np.array(q)[:, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert np.array(gate)[:, 0].tolist() == [3, 4, 5, 9, 10, 11]
    with pytest.raises(CheckpointError, match="q_proj has 12 rows"):
        split_heads("q_proj", weight, 5)


MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                             "partial_rotary_factor": 0.6, **MROPE}},
        {"rope_theta": 1e7, "rope_scaling": {"type": "mrope", **MROPE},
         "partial_rotary_factor": 0.6},
        {"rope_theta": 1e7, "rope_scaling": {"type": "default", "rope_type": "default", **MROPE},
         "partial_rotary_factor": 0.6},
        {"rope_theta": 1e7, "partial_rotary_factor": 0.6, **MROPE},
    ],
    ids=["nested", "older", "both_kinds", "flat"],
)  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True])
def test_position_axes_of_images_do_not_disturb_text(rope, wrapped, tmp_path):
    from turbospark.loading.config import normalise

    own = {k: v for k, v in TINY["qwen3_5"].items() if k != "partial_rotary_factor"} | rope
    raw = {"model_type": "qwen3_5", **own}
    if wrapped:
        raw = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **own}}
    model = resolve_family("qwen3_5").build(normalise(raw, tmp_path / "config.json"))
    table = model.model.layers[2].self_attn.attend.rotate._rope
    expected = rope_frequencies("default", 1e7, 10, partial_rotary_factor=0.6)[0]
    assert np.array_equal(table.inv_freq, expected)
    assert len(table.inv_freq) == 3


def test_a_quarter_of_a_head_rotates_where_the_config_is_silent():
    config = {k: v for k, v in TINY["qwen3_5"].items() if k != "partial_rotary_factor"}
    model = resolve_family("qwen3_5").build(config | {"head_dim": 16})
    assert len(model.model.layers[2].self_attn.attend.rotate._rope.inv_freq) == 2


def test_listed_layer_types_hold_over_the_interval():
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model = tiny_model("qwen3_5", layer_types=kinds)
    assert [cache.recurrent for cache in model.make_caches(9, 0)] == [False, True, True, False]
    plain = tiny_model("qwen3_5")
    assert [cache.recurrent for cache in plain.make_caches(9, 0)] == [True, True, False, True]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "qwen3_5_mo"}, UnsupportedError, "'qwen3_5_mo' is not of the qwen3_5"),
        ({"layer_types": ["linear_attention"] * 3}, ConfigError, "lists 3 layers"),
        ({"layer_types": ["mamba"] * 4}, UnsupportedError, r"layer_types\[0\]='mamba'"),
        ({"layer_types": ["full_attention"] * 4}, UnsupportedError, "without a linear_attention"),
        ({"linear_num_value_heads": 7}, ConfigError, "linear_num_value_heads=7 is not a multiple"),
        ({"linear_conv_kernel_dim": 1}, ConfigError, "linear_conv_kernel_dim=1 is out of range"),
        ({"partial_rotary_factor": 0.5}, ConfigError, "is 5 dimensions"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act='gelu'"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias=True"),
        ({"attn_output_gate": False}, UnsupportedError, "attn_output_gate=False"),
        ({"norm_topk_prob": False}, UnsupportedError, "norm_topk_prob=False"),
        ({"mlp_only_layers": [1]}, UnsupportedError, "mlp_only_layers"),
        ({"num_experts_per_tok": 8}, ConfigError, "num_experts_per_tok=8 is more than"),
    ],
)
def test_what_no_release_has_is_refused(change, error, message):
    raw = TINY["qwen3_5_moe"] | {"model_type": "qwen3_5_moe"} | change
    with pytest.raises(error, match=message):
        resolve_family("qwen3_5").build(raw)


def test_dense_and_routed_types_are_told_apart_exactly():
    for model_type, routed in (("qwen3_5", False), ("qwen3_5_moe", True), ("qwen3_5_text", False)):
        mlp = tiny_model(model_type).model.layers[0].mlp
        assert hasattr(mlp, "experts") is routed


def test_the_configuration_is_read_whole():
    model = tiny_model("qwen3_5_moe")
    config = dataclasses.asdict(model.config)
    given = {k: v for k, v in TINY["qwen3_5_moe"].items() if k != "partial_rotary_factor"}
    assert {name: config[name] for name in given} == given

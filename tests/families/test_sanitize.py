"""Checkpoint names of every exporter become the model's own."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, int4_weights, load_golden
from golden.tiny import tiny_model
from mlx.utils import tree_flatten

from turbospark.errors import CheckpointError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.weights import split_rows

VISION = {
    "vision_tower.encoder.layers.0.weight": mx.zeros((2,)),
    "model.vision_tower.patch.weight": mx.zeros((2,)),
    "multi_modal_projector.mm_soft_emb_norm.weight": mx.zeros((2,)),
    "model.multi_modal_projector.mm_input_projection_weight": mx.zeros((2,)),
}


def own_weights(model):
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_wrapper_prefixes_come_off(model_type, prefix):
    model = tiny_model(model_type)
    own = own_weights(model)
    wrapped = {prefix + name.removeprefix("model."): value for name, value in own.items()}
    sanitized = model.sanitize(wrapped | VISION)
    assert sanitized.keys() == own.keys()


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_an_untied_head_keeps_its_name(prefix):
    model = tiny_model("gemma3", tie_word_embeddings=False)
    head = {f"{prefix}lm_head.weight": mx.zeros((67, 24))}
    assert model.sanitize(head).keys() == {"lm_head.weight"}


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "qwen2"])
def test_a_second_copy_of_a_tied_head_is_left_out(model_type):
    model = tiny_model(model_type)
    assert model.sanitize({"lm_head.weight": mx.zeros((67, 24))}) == {}


def test_frequencies_of_old_exports_are_left_out():
    model = tiny_model("llama")
    stored = {
        "model.layers.1.self_attn.rotary_emb.inv_freq": mx.zeros((5,)),
        "model.rotary_emb.inv_freq": mx.zeros((5,)),
    }
    assert model.sanitize(stored) == {}


def test_vision_tensors_of_a_text_family_are_not_skipped():
    name = "vision_tower.encoder.layers.0.weight"
    assert tiny_model("llama").sanitize({name: VISION[name]}).keys() == {name}


def test_gemma4_drops_keys_and_values_of_shared_layers_only():
    model = tiny_model("gemma4")
    names = [
        f"model.layers.{layer}.self_attn.{leaf}.weight"
        for layer in (2, 3)
        for leaf in ("k_proj", "v_proj", "k_norm", "q_proj")
    ]
    kept = model.sanitize(dict.fromkeys(names, mx.zeros((2,))))
    assert sorted(kept) == sorted([*names[:4], names[7]])


def test_gemma4_names_of_mlx_and_of_transformers_are_one_model():
    golden = load_golden("gemma4_moe")
    theirs = float_weights(golden)
    converted = {}
    for name, value in theirs.items():
        name = "language_model." + name
        if name.endswith(".experts.gate_up_proj"):
            gate, up = mx.split(value, 2, axis=1)
            stem = name.replace("experts.gate_up_proj", "experts.switch_glu")
            converted[f"{stem}.gate_proj.weight"] = gate
            converted[f"{stem}.up_proj.weight"] = up
        elif name.endswith(".experts.down_proj"):
            stem = name.replace("experts.down_proj", "experts.switch_glu")
            converted[f"{stem}.down_proj.weight"] = value
        else:
            converted[name] = value
    tokens = golden.tokens[:9]
    one, other = (build_model(golden.config, weights) for weights in (theirs, converted))
    assert np.array_equal(feed(one, tokens, [9]), feed(other, tokens, [9]))


def test_fused_quantized_experts_are_split_by_rows():
    golden = load_golden("gemma4_moe")
    name = "model.layers.0.experts.gate_up_proj.weight"
    fused = int4_weights(golden)[name]
    assert isinstance(fused, QuantizedWeight)
    gate, up = split_rows(name, fused)
    assert gate.shape == up.shape == (8, 64, 128)
    joined = mx.concatenate([dequantize_reference(gate), dequantize_reference(up)], axis=1)
    assert np.array_equal(np.array(joined), np.array(dequantize_reference(fused)))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(CheckpointError, match="x has 5 rows"):
        split_rows("x", mx.zeros((5, 4)))

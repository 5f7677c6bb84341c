"""Whole qwen3_5 checkpoints: as MLX converts them, quantized while loading, converted here."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import feed, int4_weights, load_golden
from loading.files import write_folder

from turbospark.errors import UnsupportedError
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.build import load_model
from turbospark.loading.convert import convert
from turbospark.nn.weights import split_rows
from turbospark.registry import GGUF_GROUP, resolve_family
from turbospark.settings import KernelPolicy

OFFSETS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
           "q_norm.weight", "k_norm.weight")  # fmt: skip
REFERENCE = KernelPolicy(kernels="reference")


def as_converted(name, value):
    """A tensor under the names of MLX conversions, with their values."""
    name = f"language_model.{name}"
    if name.endswith("experts.gate_up_proj.weight"):
        stem = name.replace("experts.gate_up_proj.weight", "switch_mlp")
        gate, up = split_rows(name, value)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if name.endswith("conv1d.weight"):
        value = value.swapaxes(1, 2)
    elif name.endswith(OFFSETS):
        value = value + 1
    return {name.replace("experts.down_proj", "switch_mlp.down_proj"): value}


def mlx_folder(golden, folder):
    """An MLX checkpoint of a fixture: 4 bits, routers in 8, and what that looks like in files."""
    tensors = {"vision_tower.merger.norm.weight": np.zeros(3, np.float32)}
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    for own, weight in int4_weights(golden).items():
        for name, value in as_converted(own, weight).items():
            if not isinstance(value, QuantizedWeight):
                tensors[name] = np.array(value)
                continue
            path = name.removesuffix(".weight")
            parts = {"weight": value.codes, "scales": value.scales, "biases": value.biases}
            tensors |= {f"{path}.{part}": np.array(array) for part, array in parts.items()}
            if value.bits != 4:
                quantization[path] = {"group_size": value.group_size, "bits": value.bits}
    kind = golden.config["model_type"]
    outer = {
        "model_type": kind.removesuffix("_text"),
        "tie_word_embeddings": golden.config["tie_word_embeddings"],
        "text_config": golden.config,
        "quantization": quantization,
    }
    return write_folder(folder, tensors, outer), quantization


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_5_tied"])
def test_a_folder_converted_by_mlx_loads_with_its_own_widths(name, tmp_path):
    golden = load_golden(name)
    folder, quantization = mlx_folder(golden, tmp_path / "a")
    loaded = load_model(folder, policy=REFERENCE)
    if name == "qwen3_5_moe":
        assert sum(isinstance(value, dict) for value in quantization.values()) == 16
    logits = feed(loaded.model, golden.tokens, [len(golden.tokens)])
    assert golden.difference(logits, "int4") < golden.tolerance


def test_quantizing_while_loading_keeps_routers_at_eight_bits(tmp_path):
    golden = load_golden("qwen3_5_moe")
    folder = write_folder(tmp_path / "a", golden.weights, golden.config)
    loaded = load_model(folder, quantize="int4", policy=REFERENCE)
    layer = loaded.model.model.layers[0]
    for module, bits in (
        (layer.mlp.gate, 8),
        (layer.mlp.shared_expert_gate, 8),
        (layer.mlp.experts.up_proj, 4),
        (layer.linear_attn.in_proj_a, 4),
    ):
        assert module.value.bits == bits
    assert layer.linear_attn.A_log.dtype == layer.linear_attn.conv1d.weight.dtype == mx.float32
    logits = feed(loaded.model, golden.tokens, [len(golden.tokens)])
    assert golden.difference(logits, "full") > 0.1


def test_a_folder_converted_here_is_the_same_model(tmp_path):
    golden = load_golden("qwen3_5_moe")
    folder = write_folder(tmp_path / "a", golden.weights, golden.config)
    convert(folder, tmp_path / "b", quantize="int4", text=None)
    quantized = load_model(folder, quantize="int4", policy=REFERENCE)
    again = load_model(tmp_path / "b", policy=REFERENCE)
    one, other = (feed(model.model, golden.tokens[:9], [9]) for model in (quantized, again))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_a_gguf_file_of_the_family_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=f"'{name}'"):
        resolve_family(name, GGUF_GROUP)

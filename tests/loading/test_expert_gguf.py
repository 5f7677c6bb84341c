"""Mixtral in a GGUF file: experts stacked, rows of q and k in llama.cpp's order."""

import numpy as np
import pytest
from golden.fixtures import feed, float_weights, load_golden
from golden.spellings import unfused
from loading.files import gguf_metadata, gguf_name, interleaved, write_gguf

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.loading.build import load_model
from turbospark.settings import KernelPolicy

REFERENCE = KernelPolicy(kernels="reference")
GOLDEN = load_golden("mixtral")
EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def metadata(**changes):
    config = GOLDEN.config
    fields = {
        "embedding_length": config["hidden_size"], "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": 3,
        "attention.head_count_kv": 1, "attention.key_length": 64, "attention.value_length": 64,
        "rope.freq_base": config["rope_theta"], "context_length": 512, "expert_count": 8,
        "expert_used_count": 2,
    }  # fmt: skip
    given = gguf_metadata(**{f"llama.{key}": value for key, value in (fields | changes).items()})
    return {key: value for key, value in given.items() if value is not None}


def own_name(name):
    path = name.removesuffix(".weight").split(".", 3)
    if path[-1] in EXPERTS:
        return f"blk.{path[2]}.{EXPERTS[path[-1]]}.weight"
    return "output.weight" if name == "lm_head.weight" else gguf_name(name)


def tensors(encode=None):
    found = {}
    for name, value in unfused(float_weights(GOLDEN)).items():
        array = np.array(value)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleaved(array, 3 if "q_proj" in name else 1)
        kind, raw = (0, array.tobytes()) if encode is None or array.ndim < 3 else encode(array)
        found[own_name(name)] = (kind, array.shape, raw)
    return found


def q8_0(array):
    blocks = array.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    return 8, np.concatenate([scales.view(np.int8), codes], axis=-1).tobytes()


def test_a_file_of_mixtral_is_the_same_model(tmp_path):
    loaded = load_model(write_gguf(tmp_path / "a.gguf", metadata(), tensors()), policy=REFERENCE)
    assert loaded.config["model_type"] == "mixtral"
    logits = feed(loaded.model, GOLDEN.tokens, [len(GOLDEN.tokens)])
    assert GOLDEN.difference(logits, "full") < GOLDEN.tolerance


def test_blocks_of_stacked_experts_keep_their_codes(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", metadata(), tensors(q8_0))
    experts = load_model(path, policy=REFERENCE).model.model.layers[1].mlp.experts
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = experts[name].value
        assert (weight.bits, weight.group_size, weight.zero) == (8, 32, 128)
        dense = unfused(float_weights(GOLDEN))[f"model.layers.1.mlp.experts.{name}.weight"]
        difference = np.abs(np.array(dequantize_reference(weight)) - np.array(dense)).max()
        assert 0 < difference < np.abs(np.array(dense)).max() / 200


def test_experts_that_stand_alone_are_refused_by_name(tmp_path):
    given = tensors()
    given["blk.0.ffn_gate.3.weight"] = given.pop("blk.0.ffn_gate_exps.weight")
    path = write_gguf(tmp_path / "a.gguf", metadata(), given)
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_gate\.3\.weight"):
        load_model(path, policy=REFERENCE)


def test_a_missing_number_of_experts_a_row_is_named(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", metadata(expert_used_count=None), tensors())
    with pytest.raises(ConfigError, match=r"a\.gguf.*llama\.expert_used_count"):
        load_model(path, policy=REFERENCE)

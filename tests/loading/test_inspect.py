"""What a checkpoint holds, whether or not its family is implemented."""

import json

import mlx.core as mx
import numpy as np
import pytest
from loading.files import (
    LLAMA,
    gguf_metadata,
    gguf_tensors,
    llama_weights,
    q8_0,
    two_shards,
    write_folder,
    write_gguf,
)

from turbospark.errors import CheckpointError, ConfigError
from turbospark.loading.inspect import inspect


def test_folder_is_described(tmp_path):
    folder = write_folder(tmp_path / "a", shards=two_shards(llama_weights()))
    found = inspect(folder)
    assert (found.kind, found.model_type, found.implemented) == ("safetensors", "llama", True)
    assert found.config == LLAMA
    assert found.tokenizer == "tokenizer.json"
    assert found.quantization == {"F32": 15}
    assert found.nbytes == sum(array.nbytes for array in llama_weights().values())
    row = next(row for row in found.tensors if row.name == "model.layers.1.mlp.down_proj.weight")
    assert (row.shape, row.type, row.file) == ((64, 160), "F32", "model-00002-of-00002.safetensors")
    shown = repr(found)
    for text in ("2 files", "llama", "20, ", "15 x F32", "hidden_size", "tokenizer.json"):
        assert text in shown


def test_quantized_folder_is_described(tmp_path):
    tensors = llama_weights()
    name = "model.layers.0.mlp.up_proj"
    parts = mx.quantize(mx.array(tensors[f"{name}.weight"]), group_size=32, bits=8)
    for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
        tensors[f"{name}.{part}"] = np.asarray(value)
    config = LLAMA | {"quantization": {"bits": 4, "group_size": 32}}
    found = inspect(write_folder(tmp_path / "a", tensors, config))
    assert found.quantization == {"F32": 14, "8 bits, groups of 32": 1}


def test_gguf_file_is_described(tmp_path):
    metadata = gguf_metadata(**{"general.architecture": "homemade", "homemade.block_count": 2})
    found = inspect(write_gguf(tmp_path / "a.gguf", metadata, gguf_tensors(encode=q8_0)))
    assert (found.kind, found.model_type, found.implemented) == ("gguf", "homemade", False)
    assert found.quantization == {"Q8_0 (8 bits, groups of 32)": 15}
    assert found.tokenizer == "in the file: llama, 263 tokens"
    assert found.config["tokenizer.ggml.tokens"] == "263 values"
    assert "no family registered" in repr(found)
    assert "block_count" in repr(found)


def test_description_is_json(tmp_path):
    for path in (write_folder(tmp_path / "a"), write_gguf(tmp_path / "a.gguf")):
        found = json.loads(json.dumps(inspect(path).as_dict()))
        assert len(found["tensors"]) == 20
        assert found["nbytes"] == sum(row["nbytes"] for row in found["tensors"])


def test_damage_is_named(tmp_path):
    folder = write_folder(tmp_path / "a")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        inspect(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model_type"):
        inspect(folder)

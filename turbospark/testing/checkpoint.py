"""A checkpoint small enough to write and load in a test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np


def write_tiny_checkpoint(folder: Path, *, seed: int = 5, **config_values: Any) -> Path:
    """Write a llama checkpoint of random weights with a byte-level tokenizer.

    It loads in a moment and talks nonsense; every shape differs from every other.

    Args:
        folder: made if it is not there.
        seed: of the weights.
        config_values: go into config.json, in place of what stands there.

    Returns:
        the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 259, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
        "bos_token_id": 256, "eos_token_id": 257, **config_values,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_byte_level_tokenizer()))
    rng = np.random.default_rng(seed)
    weights = {
        name: mx.array((rng.integers(-64, 65, shape) / 256).astype(np.float32))
        for name, shape in _llama_shapes(config).items()
    }
    path = str(folder / "model.safetensors")
    mx.save_safetensors(path, weights)  # pyright: ignore[reportUnknownMemberType]
    return folder


def _llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "self_attn.q_proj.weight"] = (queries, hidden)
        shapes[at + "self_attn.k_proj.weight"] = (keys, hidden)
        shapes[at + "self_attn.v_proj.weight"] = (keys, hidden)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[at + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _byte_level_tokenizer() -> dict[str, Any]:
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in letters]
    symbols = {byte: chr(byte) for byte in letters}
    symbols |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    marks = ("<bos>", "<eos>", "<end>")
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 256 + index, "content": mark, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for index, mark in enumerate(marks)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "post_processor": None,
        "model": {
            "type": "BPE", "merges": [], "vocab": {symbols[byte]: byte for byte in range(256)},
        },
    }  # fmt: skip

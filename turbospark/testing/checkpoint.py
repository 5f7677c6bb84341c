"""The files of a checkpoint, and one small enough to write and load in a test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn

from turbospark.loading.install import parameter_slots
from turbospark.registry import resolve_family
from turbospark.testing.drawn import write_drawn_weights
from turbospark.testing.vocabulary import LEAST_IDS, MARKS, byte_level_tokenizer

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)


def write_tiny_checkpoint(folder: Path, *, seed: int = 5, **config_values: Any) -> Path:
    """Write a llama checkpoint of random weights with a byte-level tokenizer.

    It loads in a moment and talks nonsense; every shape differs from every other. Its ids are
    those of `ByteTokenizer`. `synthetic` writes other families, quantized ones, chat templates.

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
    model = cast("nn.Module", resolve_family(config["model_type"]).build(config))
    write_drawn_weights(folder, [parameter_slots(model)], None, seed)
    write_texts(folder, config, chat=False)
    return folder


def write_texts(folder: Path, config: Mapping[str, Any], *, chat: bool = True) -> None:
    """Write the files beside the weights: configuration and tokenizer.

    Args:
        folder: where they go.
        config: of the model.
        chat: whether the tokenizer has a chat template and knows its marks by their names.
    """
    _write(folder / "config.json", config)
    size = max(int(config["vocab_size"]), LEAST_IDS)
    _write(folder / "tokenizer.json", byte_level_tokenizer(size))
    if not chat:
        return
    bos, eos, end = MARKS
    ids = {"bos_token_id": 256, "eos_token_id": [257, 258]}
    _write(folder / "generation_config.json", ids)
    settings = {
        "bos_token": bos, "eos_token": eos, "additional_special_tokens": [end],
        "add_bos_token": True, "chat_template": _TEMPLATE,
    }  # fmt: skip
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")

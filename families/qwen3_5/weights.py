"""Checkpoint names of the qwen3_5 family, raw or converted, as the model's own."""

from collections.abc import Mapping
from typing import Any

from families.qwen3_5.config import Qwen3_5Config, Qwen3_5MoeConfig
from turbospark.nn.expert_weights import expert_weights
from turbospark.nn.weights import gates_apart, text_weights, with_offset

BESIDE_TEXT = ("vision_tower", "visual", "mtp")
OFFSET_NORMS = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight",
)  # fmt: skip


def is_raw(weights: Mapping[str, Any]) -> bool:
    """Whether a trunk's tensors are as trained: norms are stored as weight - 1.

    Converters add the 1 and turn the filters at the same time, so the filters tell.
    """
    return any(
        name.endswith("conv1d.weight") and value.shape[-1] != 1 for name, value in weights.items()
    )


def trunk_weights(config: Qwen3_5Config, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The trunk's tensors under the model's names; idempotent.

    Left out: the vision tower, and the layers that predict further tokens (`mtp`).
    """
    raw = is_raw(weights)
    text = text_weights(weights, BESIDE_TEXT, tied=config.tie_word_embeddings)
    found: dict[str, Any] = {}
    for name, value in layer_weights(config, text).items():
        if name.endswith("conv1d.weight") and value.shape[-1] != 1:
            value = value.swapaxes(-1, -2)  # [channels, 1, taps] as trained
        elif raw and (name.endswith(OFFSET_NORMS) or name == "model.norm.weight"):
            value = with_offset(value)
        found[name] = value
    return found


def layer_weights(config: Qwen3_5Config, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Queries apart from their gates, and the experts of a layer stacked; idempotent."""
    found = gates_apart(weights, config.num_attention_heads, config.head_dim)
    if isinstance(config, Qwen3_5MoeConfig):
        return expert_weights(found, config.num_experts)
    return found

"""GGUF files of the llama flow."""

from collections.abc import Mapping
from typing import Any

from turbospark.nn.config import Count, Size
from turbospark.nn.gguf import BLOCK_NAMES, Metadata, common_config
from turbospark.protocols import GGUFMapping

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
EXPERTS = {
    "blk.{i}.ffn_gate_inp": "model.layers.{i}.mlp.gate",
    "blk.{i}.ffn_gate_exps": "model.layers.{i}.mlp.experts.gate_proj",
    "blk.{i}.ffn_up_exps": "model.layers.{i}.mlp.experts.up_proj",
    "blk.{i}.ffn_down_exps": "model.layers.{i}.mlp.experts.down_proj",
}
"""Tensors in place of a dense MLP's."""


def gguf_mapping(architecture: str) -> GGUFMapping:
    """How a GGUF file of an architecture of the llama flow reads.

    The metadata of `llama` and `qwen2` do not name a window, and llama.cpp uses none for them.
    Mixtral comes as `llama`, told apart by its number of experts. The weights of a row's experts
    sum to 1 in llama.cpp, whatever the released configuration says.
    """
    names = BLOCK_NAMES | {"blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm"}
    if architecture in ("llama", "qwen3moe"):
        names |= EXPERTS

    def config(metadata: Mapping[str, Any]) -> dict[str, Any]:
        fields = Metadata(metadata, architecture)
        fields.refuse("attention.sliding_window", 0)
        if architecture == "qwen3moe":
            return common_config(fields, experts=True) | _routing(fields) | _qwen3_moe(fields)
        if architecture == "llama" and fields.read("expert_count", Count, 0):
            found = common_config(fields, experts=True) | _routing(fields)
            return found | {"model_type": "mixtral"}
        return common_config(fields) | {"model_type": architecture}

    return GGUFMapping(
        config=config,
        names=names,
        interleaved_rope=("q_proj", "k_proj") if architecture == "llama" else (),
    )


def _routing(fields: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": fields.read("expert_count", Size),
        "num_experts_per_tok": fields.read("expert_used_count", Size),
    }


def _qwen3_moe(fields: Metadata) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": fields.read("expert_feed_forward_length", Size),
        "norm_topk_prob": True,
    }

"""Small configurations: the kinds of Gemma 4, and one of every other family.

Widths divide into groups of 64, so that every matrix can be quantized.
"""

from collections.abc import Mapping
from typing import Any

_ANY: Mapping[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "bos_token_id": 256, "eos_token_id": [257, 258],
}  # fmt: skip
_WINDOW = {"sliding_window": 16}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
_GEMMA4 = {
    **_ANY, **_WINDOW, "model_type": "gemma4_text", "num_hidden_layers": 6,
    "sliding_window_pattern": 1, "global_head_dim": 64, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_SLIDING = _GEMMA4 | {"sliding_window_pattern": 3}
_MOE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64}

KINDS: Mapping[str, Mapping[str, Any]] = {
    "dense": _GEMMA4,
    "sliding": _SLIDING,
    "moe": _SLIDING | _MOE,
    "streamed": _SLIDING | _MOE | {"num_experts": 32},
}
"""config.json of every kind of Gemma 4."""

_QWEN3_5 = {
    "num_hidden_layers": 4, "full_attention_interval": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
}  # fmt: skip
_OWN: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "gemma3": {**_WINDOW, "sliding_window_pattern": 3},
    "gemma4": {"sliding_window_pattern": 3, "hidden_size_per_layer_input": 0, **_WINDOW},
    "gpt_oss": {
        **_WINDOW, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    },
    "mistral": _WINDOW,
    "mixtral": {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 3},
    "muse_glimmer": {**_WINDOW, "num_hidden_layers": 5},
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "qwen4_exp": {
        **_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 64, "hc_count": 3,
        "hc_lowrank": 64, "indexer_n_heads": 2, "indexer_head_dim": 64, "indexer_budget": 24,
        "ple_layer_ids": [2], "ple_embed_dim": 128, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
    },
    "spark2_5": {
        **_WINDOW, "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1e4},
        },
    },
}  # fmt: skip


def sizes_of(model_type: str) -> Mapping[str, Any]:
    """config.json of a small model; of a type that is not known here, what all families have."""
    own = _OWN.get(model_type) or _OWN.get(model_type.removesuffix("_text"), {})
    return {**_ANY, **own, "model_type": model_type}

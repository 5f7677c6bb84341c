"""A tiny configuration for every registered model type, and random weights for it."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from turbospark.kernels.reference import ReferenceKernels
from turbospark.nn.unit import bind_units
from turbospark.registry import resolve_family

WINDOW = 7

_LLAMA = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 90,
}  # fmt: skip
_GEMMA3 = _LLAMA | {"sliding_window": WINDOW, "sliding_window_pattern": 2, "num_hidden_layers": 3}
_GEMMA4 = _GEMMA3 | {
    "global_head_dim": 14, "num_hidden_layers": 6, "sliding_window_pattern": 3,
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 67, "enable_moe_block": True, "num_experts": 7,
    "top_k_experts": 3, "moe_intermediate_size": 11, "final_logit_softcapping": 20.0,
}  # fmt: skip
_QWEN = _LLAMA | {
    "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    "tie_word_embeddings": True,
}  # fmt: skip
_MIXTRAL = _LLAMA | {
    "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 13,
    "sliding_window": WINDOW,
}  # fmt: skip
_QWEN3_MOE = _LLAMA | {
    "num_hidden_layers": 3, "num_experts": 7, "num_experts_per_tok": 3,
    "moe_intermediate_size": 11, "mlp_only_layers": [1], "tie_word_embeddings": True,
}  # fmt: skip
_DEEPSEEK_V2 = _LLAMA | {
    "num_hidden_layers": 3, "num_key_value_heads": 6, "q_lora_rank": 9, "kv_lora_rank": 13,
    "qk_nope_head_dim": 7, "qk_rope_head_dim": 10, "v_head_dim": 5, "first_k_dense_replace": 1,
    "moe_intermediate_size": 11, "n_routed_experts": 8, "n_shared_experts": 3,
    "num_experts_per_tok": 3, "topk_method": "group_limited_greedy", "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
_GPT_OSS = _LLAMA | {
    "num_hidden_layers": 3, "intermediate_size": 11, "num_local_experts": 7,
    "num_experts_per_tok": 3, "sliding_window": WINDOW, "swiglu_limit": 0.3,
}  # fmt: skip
_QWEN3_5 = _LLAMA | {
    "num_hidden_layers": 4, "full_attention_interval": 3, "linear_num_key_heads": 3,
    "linear_num_value_heads": 6, "linear_key_head_dim": 7, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.6,
}  # fmt: skip
_QWEN3_5_MOE = _QWEN3_5 | {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 11,
    "shared_expert_intermediate_size": 13, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN4 = _LLAMA | {
    "hidden_size": 8, "hc_count": 3, "hc_lowrank": 5, "num_hidden_layers": 4,
    "full_attention_interval": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "linear_key_head_dim": 7, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid", "partial_rotary_factor": 0.6, "num_experts": 7,
    "num_experts_per_tok": 3, "moe_intermediate_size": 11, "shared_expert_intermediate_size": 13,
    "indexer_n_heads": 3, "indexer_head_dim": 9, "indexer_budget": 6,
    "indexer_compress_ratio": 3, "ple_layer_ids": [2, 4], "ple_embed_dim": 20, "ngram_size": 3,
    "heads_per_ngram": 2, "ngram_vocab_size_base": 31, "make_ngram_vocab_size_divisible_by": 7,
    "eos_token_id": 5,
}  # fmt: skip
_MUSE = _LLAMA | {
    "num_hidden_layers": 5, "sliding_window": WINDOW, "output_multiplier": 0.5,
    "final_logit_softcapping": 2.0, "post_norm_eps": 0.01,
}  # fmt: skip
_SPARK = _LLAMA | {
    "num_hidden_layers": 4, "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.4},
        "sliding_attention": {"rope_theta": 1e4},
    },
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK_V2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gpt_oss": _GPT_OSS,
    "llama": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "mistral": _LLAMA | {"sliding_window": WINDOW},
    "mixtral": _MIXTRAL,
    "muse_glimmer": _MUSE,
    "muse_glimmer_text": _MUSE,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_text": _QWEN3_5,
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "spark2_5": _SPARK,
}


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A bound model with random weights."""
    config = TINY[model_type] | {"model_type": model_type} | changes
    model: Any = resolve_family(model_type).build(config)
    mx.random.seed(11)
    for path, value in tree_flatten(model.parameters()):
        assert isinstance(value, mx.array)
        spread = 0.2 if value.ndim == 1 else value.shape[-1] ** -0.5
        noise = mx.random.normal(value.shape) * spread
        _set(model, path, value + noise)
    bind_units(model, ReferenceKernels())
    return model


def _set(model: Any, path: str, value: mx.array) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    setattr(model, leaf, value)

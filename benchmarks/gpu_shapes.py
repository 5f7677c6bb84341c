"""The shapes of gpu_decode.py: published models as their config.json describes them."""

from collections.abc import Mapping
from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_QWEN: dict[str, Any] = {
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_GEMMA: dict[str, Any] = {
    "hidden_size": 2816,
    "num_hidden_layers": 30,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-1B": _LLAMA
    | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-8B": _LLAMA
    | {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "qwen3_5-4B": _QWEN
    | {
        "model_type": "qwen3_5", "hidden_size": 2560, "intermediate_size": 9216,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "linear_num_value_heads": 32, "tie_word_embeddings": True,
    },
    "qwen3_5-27B": _QWEN
    | {
        "model_type": "qwen3_5", "hidden_size": 5120, "intermediate_size": 17_408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "linear_num_value_heads": 48, "tie_word_embeddings": False,
    },
    "qwen3_5-35B-A3B": _QWEN
    | {
        "model_type": "qwen3_5_moe", "hidden_size": 2048, "intermediate_size": 512,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
    "gemma4-26B-A4B": {"model_type": "gemma4", "tie_word_embeddings": True, "text_config": _GEMMA},
    "qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rope_theta": 1e6, "rms_norm_eps": 1e-6, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "gpt-oss-20B": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
        "vocab_size": 201_088, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "n_group": 1, "topk_group": 1, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
        "vocab_size": 102_400, "max_position_embeddings": 163_840, "tie_word_embeddings": False,
    },
    "spark2_5-4B": {
        "model_type": "spark2_5", "hidden_size": 2560, "intermediate_size": 10_240,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 9,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
            },
        },
        "vocab_size": 131_072, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "muse-glimmer-30B": {
        "model_type": "muse_glimmer", "hidden_size": 6656, "intermediate_size": 19_968,
        "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "sliding_window": 2048, "rope_theta": 500_000.0,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 13,
        "layer_rope_theta": [500_000.0, 500_000.0, 500_000.0, 0.0] * 13,
        "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
        "vocab_size": 202_048, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shape name to the config.json of a checkpoint of it."""

TINY: Mapping[str, Any] = _LLAMA | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
"""What a CPU runs within seconds, to see that a script works."""


_PER_LAYER = ("layer_types", "layer_rope_theta")


def shrunk(config: Mapping[str, Any], layers: int, vocab_size: int = 1024) -> dict[str, Any]:
    """A shape cut to its first layers and its last, and to a small vocabulary.

    The last one stays what it is: of some families it is never of the kind that slides.
    """
    small = dict(config)
    if "text_config" in small:
        small["text_config"] = dict(small["text_config"])
        small["vocab_size"] = vocab_size
    text = small.get("text_config", small)
    text |= {"num_hidden_layers": layers, "vocab_size": vocab_size}
    for name in _PER_LAYER:
        if name in text:
            text[name] = [*text[name][: layers - 1], text[name][-1]]
    return small

"""What the drafters' golden checkpoints are: a tiny Qwen 3.5 trunk with heads, block drafters.

The window is shorter than the prompt, and every size differs from every other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

if __package__:
    from golden.weights import draw_weights
else:
    from weights import draw_weights

SEED = 35
PROMPT = 19
VOCAB = 331
CHAIN = 4  # tokens that a head drafts from its own output
ACCEPTED = 2  # proposals that the second round of a block drafter follows

TRUNK: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": VOCAB - 1,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
MOE: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
# Its head reads chosen blocks of rows from the ninth row on.
STREAMS: dict[str, Any] = TRUNK | {
    "hidden_size": 48,
    "hc_count": 3,
    "hc_lowrank": 10,
    "output_gate_type": "sigmoid",
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "ple_layer_ids": [2],
    "ple_embed_dim": 36,
    "ple_conv_kernel_size": 3,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 61,
    "make_ngram_vocab_size_divisible_by": 9,
    "split_ngram_parts": 3,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 14,
    "indexer_budget": 6,
    "indexer_compress_ratio": 3,
}
BLOCK: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 18,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "sliding_window": 8,
}
DFLASH2 = BLOCK | {
    "layer_types": ["sliding_attention"] * 3,
    "dflash_config": {
        "block_size": 5,
        "mask_token_id": 320,
        "target_layer_ids": [0, 2, 3],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 9,
        "selector_top_k": 7,
    },
}
DFLASH1 = BLOCK | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "block_size": 6,
    "dflash_config": {"mask_token_id": 321, "target_layer_ids": [1, 3]},
}
# Over the trunk of the fixture `muse_glimmer`. A block is longer than the window.
ASSISTANT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 18,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
    "max_position_embeddings": 256,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "block_size": 7,
    "mask_token_id": 316,
    "target_layer_ids": [1, 3, 5],
}
HEADS = {"qwen3_5_mtp": TRUNK, "qwen3_5_moe_mtp": TRUNK | MOE, "qwen4_exp_mtp": STREAMS}
BLOCKS = {"dflash2": DFLASH2, "dflash1": DFLASH1}


def draw_trunk(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """A trunk and its head under published names: all norms but one kind hold weight - 1."""
    plain = {name: shape for name, shape in shapes.items() if "linear_attn.norm" in name}
    rest = {name: shape for name, shape in shapes.items() if name not in plain}
    return draw_weights(rest, SEED, centred_norms=True) | draw_weights(plain, SEED)


def draw_block_drafter(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """A block drafter, whose norms are plain; its selector has a say in every choice."""
    drawn = draw_weights(shapes, SEED + 1)
    return {
        name: value * np.float32(4 if "codebook" in name else 1) for name, value in drawn.items()
    }

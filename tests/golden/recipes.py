"""What the golden checkpoints are: transformers classes, their arguments, and old spellings.

Sizes are multiples of 64 where INT4 groups need it and differ from each other, the window is
shorter than the prompt so that rings wrap, and every branch of a family has a recipe.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WINDOW = 7
TOKENS = 40
PROMPT = 24  # tokens of the prefill in the stepwise run

Patch = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Recipe:
    """One tiny checkpoint.

    Attributes:
        config: transformers' configuration class.
        model: transformers' model class.
        arguments: of the configuration.
        older: turns the saved configuration into the spelling that most published files have.
        settings: for `draw_weights`.
        mxfp4: the quantized form keeps its experts, which lie [E, K, N], in MXFP4.
        stream_rows: rows of the stream between layers that the fixture keeps; their values before
            the first layer, between any two, and after the final norm.
    """

    config: str
    model: str
    arguments: dict[str, Any]
    older: Patch
    settings: dict[str, Any] = field(default_factory=dict)
    mxfp4: bool = False
    stream_rows: int = 0


def flat_rope(kind_key: str = "rope_type") -> Patch:
    """Write `rope_parameters` as `rope_theta` and `rope_scaling`."""

    def patch(config: dict[str, Any]) -> None:
        parameters = dict(config.pop("rope_parameters"))
        config["rope_theta"] = parameters.pop("rope_theta")
        kind = parameters.pop("rope_type", "default")
        config["rope_scaling"] = None if kind == "default" else {kind_key: kind, **parameters}

    return patch


def _older_gemma3(config: dict[str, Any]) -> None:
    parameters = config.pop("rope_parameters")
    full = dict(parameters["full_attention"])
    config["rope_theta"] = full.pop("rope_theta")
    config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    config["rope_scaling"] = None if full["rope_type"] == "default" else full
    config["_sliding_window_pattern"] = 6
    del config["layer_types"]


def _older_gemma4(config: dict[str, Any]) -> None:
    text = config.get("text_config", config)
    layers = text.pop("per_layer_config")
    full = next(iter(layers.values()))
    text["global_head_dim"] = full["head_dim"]
    text["num_global_key_value_heads"] = full.get("num_key_value_heads")


def _older_qwen3_5(config: dict[str, Any]) -> None:
    parameters = dict(config.pop("rope_parameters"))
    for name in ("rope_theta", "partial_rotary_factor"):
        config[name] = parameters.pop(name)
    parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = parameters
    config["full_attention_interval"] = 4
    del config["layer_types"]


def _older_qwen4(config: dict[str, Any]) -> None:
    """As published: attention layers by their old name, several ends of text."""
    parameters = dict(config.pop("rope_parameters"))
    for name in ("rope_theta", "partial_rotary_factor"):
        config[name] = parameters.pop(name)
    parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = parameters
    config["layer_types"] = [kind.replace("indexed", "full") for kind in config["layer_types"]]
    config["eos_token_id"] = [config["eos_token_id"], 319]


def _older_qwen3_moe(config: dict[str, Any]) -> None:
    flat_rope()(config)
    config["num_experts"] = config.pop("num_local_experts")


def _older_muse(config: dict[str, Any]) -> None:
    """As the lists' defaults have it."""
    text = config["text_config"]
    flat_rope()(text)
    del text["layer_types"], text["layer_rope_theta"]


def _older_spark(config: dict[str, Any]) -> None:
    for name in ("layer_types", "rms_norm_eps", "tie_word_embeddings"):
        config.pop(name, None)


def _untied(config: dict[str, Any]) -> None:
    flat_rope("type")(config)
    del config["tie_word_embeddings"]


_GEMMA3 = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "head_dim": 64,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_GEMMA4 = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}
_GEMMA4_DENSE = dict(
    _GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0
)
_LLAMA = {
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
# Without head_dim the heads divide the hidden size.
_SPLIT = dict(_LLAMA, num_attention_heads=3, num_key_value_heads=1)
del _SPLIT["head_dim"]

_QWEN3_5 = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 319,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}

_QWEN4 = _QWEN3_5 | {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "output_gate_type": "sigmoid",
    "hc_count": 4,
    "hc_lowrank": 64,
    "ple_layer_ids": [2, 5],
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 97,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "indexer_n_heads": 3,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "eos_token_id": 133,  # three of the tokens, two of them one token apart
    "tie_word_embeddings": False,
}

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}

# Epsilons so large that taking one for the other shows.
_MUSE = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": WINDOW,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 2.0,
    "rms_norm_eps": 0.02,
    "post_norm_eps": 0.3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
    "bos_token_id": 0,
    "eos_token_id": 319,
}
_TINY_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "max_position_embeddings": 16,
}
_SPARK = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "gate_attn_act_mode": "sigmoid",
    "headwise_attn_output_gate": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {
        "full_attention": {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    },
}

_GEMMA3_DRAW = {"centred_norms": True, "embedding_spread": 0.09}
_GEMMA4_DRAW = {"embedding_spread": 0.09}
_TIED_DRAW = {"embedding_spread": 0.25}


def _gemma3(full: dict[str, Any], **arguments: Any) -> Recipe:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, **full},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    arguments = dict(_GEMMA3, rope_parameters=rope, **arguments)
    return Recipe("Gemma3TextConfig", "Gemma3ForCausalLM", arguments, _older_gemma3, _GEMMA3_DRAW)


_DEEPSEEK_V2 = {
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _deepseek_v2(rope: dict[str, Any] | None = None, **arguments: Any) -> Recipe:
    rope = rope or _rope(
        10_000.0,
        "yarn",
        factor=40.0,
        beta_fast=32,
        beta_slow=1,
        mscale=0.707,
        mscale_all_dim=0.707,
        original_max_position_embeddings=128,
    )
    arguments = _DEEPSEEK_V2 | arguments | {"rope_parameters": rope}
    return Recipe("DeepseekV2Config", "DeepseekV2ForCausalLM", arguments, flat_rope("type"))


def _qwen3_5(kind: str, **arguments: Any) -> Recipe:
    settings: dict[str, Any] = {"centred_norms": True}
    if arguments["tie_word_embeddings"]:
        settings["embedding_spread"] = 0.5
    return Recipe(
        f"{kind}TextConfig",
        f"{kind}ForCausalLM",
        _QWEN3_5 | arguments,
        _older_qwen3_5,
        settings,
        stream_rows=0 if arguments["tie_word_embeddings"] else 11,
    )


def _qwen4(**arguments: Any) -> Recipe:
    settings: dict[str, Any] = {"centred_norms": True}
    if arguments.get("tie_word_embeddings"):
        settings["embedding_spread"] = 0.5
    return Recipe(
        "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", _QWEN4 | arguments, _older_qwen4, settings
    )


def _gemma4(arguments: dict[str, Any]) -> Recipe:
    return Recipe("Gemma4TextConfig", "Gemma4ForCausalLM", arguments, _older_gemma4, _GEMMA4_DRAW)


def _muse(older: Patch, **text: Any) -> Recipe:
    return Recipe(
        "MuseGlimmerConfig",
        "MuseGlimmerForConditionalGeneration",
        {
            "text_config": _MUSE | text,
            "vision_config": _TINY_TOWER,
            "out_hidden_size": 128,
            "projector_hidden_size": 48,
            "image_token_id": 318,
            "video_token_id": 317,
        },
        older,
        {"centred_norms": True, "plain_norms": ["model.language_model.norm.weight"]},
    )


def _gpt_oss(**rope: Any) -> Recipe:
    return Recipe(
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(_GPT_OSS, rope_parameters=_GPT_OSS_ROPE | rope),
        flat_rope(),
        {"gate_spread": 0.35},
        mxfp4=True,
    )


def _rope(theta: float, kind: str = "default", **numbers: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **numbers}


_YARN = _rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=128)

RECIPES: dict[str, Recipe] = {
    "gemma3_text": _gemma3({}, num_key_value_heads=1, query_pre_attn_scalar=64),
    "gemma3_text_linear": _gemma3(
        {"rope_type": "linear", "factor": 8.0},
        num_key_value_heads=2,
        query_pre_attn_scalar=48,
        attention_bias=True,
    ),
    "gemma4_dense": _gemma4(_GEMMA4_DENSE),
    "gemma4_moe": _gemma4(
        dict(
            _GEMMA4_DENSE,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=64,
        )
    ),
    "gemma4_ple": _gemma4(
        dict(
            _GEMMA4,
            hidden_size_per_layer_input=64,
            vocab_size_per_layer_input=320,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
        )
    ),
    "gemma4_wrapper": Recipe(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {"text_config": dict(_GEMMA4_DENSE), "vision_config": None, "audio_config": None},
        _older_gemma4,
        _GEMMA4_DRAW,
    ),
    "llama2": Recipe(
        "LlamaConfig",
        "LlamaForCausalLM",
        dict(
            _SPLIT,
            num_attention_heads=6,
            num_key_value_heads=6,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters=_rope(10_000.0),
        ),
        flat_rope(),
    ),
    "llama3": Recipe(
        "LlamaConfig",
        "LlamaForCausalLM",
        dict(
            _LLAMA,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            max_position_embeddings=131072,
            rope_parameters=_rope(
                500_000.0,
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
        flat_rope(),
        _TIED_DRAW,
    ),
    "llama_untied": Recipe(
        "LlamaConfig",
        "LlamaForCausalLM",
        dict(
            _LLAMA,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters=_rope(10_000.0, "linear", factor=2.0),
        ),
        _untied,
    ),
    "mistral": Recipe(
        "MistralConfig",
        "MistralForCausalLM",
        dict(
            _LLAMA,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            sliding_window=None,
            rope_parameters=_rope(1e6),
        ),
        flat_rope(),
    ),
    "mistral_swa": Recipe(
        "MistralConfig",
        "MistralForCausalLM",
        dict(
            _LLAMA,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            sliding_window=WINDOW,
            rope_parameters=_rope(10_000.0),
        ),
        flat_rope(),
    ),
    "qwen2": Recipe(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        dict(_SPLIT, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=_rope(1e6)),
        flat_rope(),
        _TIED_DRAW,
    ),
    "qwen2_yarn_swa": Recipe(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        dict(
            _SPLIT,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
            rope_parameters=dict(_YARN),
        ),
        flat_rope("type"),
    ),
    "qwen3": Recipe(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        dict(_LLAMA, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=_rope(1e6)),
        flat_rope(),
        _TIED_DRAW,
    ),
    "qwen3_yarn_swa": Recipe(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        dict(
            _LLAMA,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
            rope_parameters=dict(_YARN),
        ),
        flat_rope(),
    ),
    "mixtral": Recipe(
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(
            _SPLIT,
            intermediate_size=64,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters=_rope(1e6),
        ),
        flat_rope(),
    ),
    "mixtral_swa": Recipe(
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(
            _LLAMA,
            intermediate_size=64,
            num_hidden_layers=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            sliding_window=WINDOW,
            num_local_experts=5,
            num_experts_per_tok=3,
            rope_parameters=_rope(10_000.0),
        ),
        flat_rope(),
        _TIED_DRAW,
    ),
    "qwen3_moe": Recipe(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(
            _LLAMA,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters=_rope(1e6),
        ),
        _older_qwen3_moe,
    ),
    "qwen3_moe_yarn_swa": Recipe(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(
            _LLAMA,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            rope_parameters=dict(_YARN),
        ),
        _older_qwen3_moe,
    ),
    "deepseek_v2": _deepseek_v2(
        q_lora_rank=64,
        n_shared_experts=1,
        first_k_dense_replace=0,
        n_routed_experts=12,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
    ),
    "deepseek_v2_lite": _deepseek_v2(
        q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1, topk_method="greedy"
    ),
    "deepseek_v2_plain": _deepseek_v2(
        _rope(50_000.0),
        num_hidden_layers=2,
        q_lora_rank=64,
        n_shared_experts=2,
        first_k_dense_replace=1,
        attention_bias=True,
        mlp_bias=True,
        routed_scaling_factor=2.5,
    ),
    "gpt_oss": _gpt_oss(),
    "gpt_oss_trunc": _gpt_oss(truncate=True),
    "muse_glimmer": _muse(_older_muse),
    # Windows and rotation listed apart: a full layer rotates, one with a window does not.
    "muse_glimmer_lists": _muse(
        lambda config: flat_rope()(config["text_config"]),
        num_hidden_layers=5,
        attention_bias=True,
        layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
        layer_rope_theta=[20_000.0, 0, 20_000.0, 20_000.0, 0],
    ),
    "spark2_5": Recipe("SparkConfig", "SparkForCausalLM", dict(_SPARK), _older_spark, _TIED_DRAW),
    "spark2_5_untied": Recipe(
        "SparkConfig",
        "SparkForCausalLM",
        dict(
            _SPARK,
            num_hidden_layers=3,
            tie_word_embeddings=False,
            rms_norm_eps=1e-5,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        lambda config: None,
    ),
    "qwen3_5": _qwen3_5("Qwen3_5", intermediate_size=192, tie_word_embeddings=False),
    "qwen3_5_tied": _qwen3_5("Qwen3_5", intermediate_size=192, tie_word_embeddings=True),
    "qwen3_5_moe": _qwen3_5(
        "Qwen3_5Moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        tie_word_embeddings=False,
    ),
    "qwen4_exp": _qwen4(),
    "qwen4_exp_tied": _qwen4(
        hc_count=2,
        num_hidden_layers=4,
        full_attention_interval=2,
        output_gate_type=None,
        ple_layer_ids=[3],
        ple_conv_kernel_size=3,
        ngram_size=4,
        ple_embed_dim=192,
        indexer_budget=6,
        indexer_compress_ratio=2,
        tie_word_embeddings=True,
    ),
}

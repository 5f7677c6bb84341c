"""Random models of real shapes, each built twice over the same INT4 arrays: ours and mlx-lm's."""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from turbospark.kernels.select import choose_kernels
from turbospark.kernels.target import KernelSet
from turbospark.loading.config import normalise
from turbospark.loading.install import Handling, install_weights
from turbospark.loading.opened import build_model, sanitized
from turbospark.nn.unit import bind_units
from turbospark.protocols import CausalModel
from turbospark.registry import resolve_family
from turbospark.settings import KernelPolicy

GROUP_SIZE = 64
DTYPE = mx.bfloat16
_PATH = Path("config.json")

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
}  # fmt: skip
"""Shape name to the config.json of a checkpoint of it."""

TINY: Mapping[str, Any] = _LLAMA | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
"""What a CPU runs within seconds, to see that a script works."""


def shrunk(config: Mapping[str, Any], layers: int, vocab_size: int = 1024) -> dict[str, Any]:
    """A shape cut to its first layers and a small vocabulary."""
    small = dict(config)
    for part in (small, small.get("text_config")):
        if part is not None and "num_hidden_layers" in part:
            part |= {"num_hidden_layers": layers, "vocab_size": vocab_size}
            if "layer_types" in part:
                part["layer_types"] = part["layer_types"][:layers]
    if "text_config" in small:
        small["text_config"] = dict(small["text_config"])
        small["vocab_size"] = vocab_size
    return small


@dataclass
class Pair:
    """Both engines' models over the same weights."""

    ours: CausalModel
    theirs: Any
    kernels: KernelSet
    bodies: dict[str, int]
    arrays: dict[str, mx.array]
    """Every weight by mlx-lm's name."""


def build_pair(config: Mapping[str, Any], policy: KernelPolicy | None = None) -> Pair:
    """Draw weights in the layout of MLX 4-bit checkpoints and give them to both."""
    theirs, arrays, quantization = _mlx_lm_model(config)
    weights = dict(arrays)
    family = resolve_family(config["model_type"])
    ours = build_model(family, normalise(dict(config), _PATH), _PATH)
    install_weights(
        ours, sanitized(ours, weights, quantization, _PATH), "random weights", Handling(False)
    )
    kernels = choose_kernels(policy or KernelPolicy())
    bodies = bind_units(ours, kernels)
    return Pair(cast("CausalModel", ours), theirs, kernels, bodies, arrays)


def _mlx_lm_model(config: Mapping[str, Any]) -> tuple[Any, dict[str, mx.array], dict[str, Any]]:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    wrapped = dict(config)
    if config["model_type"].startswith("qwen3_5"):
        wrapped = {"model_type": config["model_type"], "text_config": dict(config)}
    model = module.Model(module.ModelArgs.from_dict(wrapped))
    predicate: Callable[[str, Any], Any] = getattr(model, "quant_predicate", None) or _always
    overrides: dict[str, Any] = {}

    def quantized(path: str, layer: Any) -> Any:
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % GROUP_SIZE:
            return False
        wish = predicate(path, layer)
        if isinstance(wish, dict):
            overrides[path] = wish
        return wish

    nn.quantize(model, GROUP_SIZE, 4, class_predicate=quantized)
    mx.random.seed(7)
    arrays: dict[str, mx.array] = {}
    for number, (name, array) in enumerate(tree_flatten(model.parameters())):
        arrays[name] = _drawn(name, array, number)
        mx.eval(arrays[name])  # one by one, so that few temporaries live at a time
    model.load_weights(list(arrays.items()))
    model.eval()
    mx.eval(model.parameters())
    return model, arrays, {"group_size": GROUP_SIZE, "bits": 4, **overrides}


def _always(_path: str, _layer: Any) -> bool:
    return True


def _drawn(name: str, like: mx.array, number: int) -> mx.array:
    """Values that keep a deep random stack finite and its logits apart."""
    shape, leaf = like.shape, name.rsplit(".", 1)[-1]
    if like.dtype == mx.uint32:
        return _hashed(mx.array(number, mx.uint32), shape)
    if leaf == "scales":
        # Codes are uniform: their deviation times the scale gives rows of unit gain.
        return (mx.random.uniform(0.9, 1.1, shape) * _scale(shape, name)).astype(DTYPE)
    if leaf == "biases":
        levels = 255 if _is_wide(name) else 15
        return mx.full(shape, -levels / 2 * _scale(shape, name)).astype(DTYPE)
    if leaf == "A_log":
        return mx.log(mx.random.uniform(1.0, 16.0, shape)).astype(mx.float32)
    if leaf == "layer_scalar":
        return mx.ones(shape, DTYPE)
    if "norm" in name or leaf in {"scale", "per_expert_scale"}:
        return mx.random.uniform(0.9, 1.1, shape).astype(DTYPE)
    return (mx.random.normal(shape) * 0.3).astype(DTYPE)


def _odd(factor: int) -> mx.array:
    return mx.array(factor, mx.uint32)


@mx.compile
def _mixed(seed: mx.array, places: mx.array) -> mx.array:
    """32 bits a place: a multiplicative hash, as good as random for codes and far quicker."""
    bits = places * _odd(2654435761) + seed * _odd(374761393)
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        bits = (bits ^ (bits >> shift)) * _odd(factor)
    return bits ^ (bits >> 16)


def _hashed(seed: mx.array, shape: tuple[int, ...]) -> mx.array:
    return _mixed(seed, mx.arange(math.prod(shape), dtype=mx.uint32)).reshape(shape)


def _is_wide(name: str) -> bool:
    path = name.rsplit(".", 1)[0]
    return path.endswith(("mlp.gate", "shared_expert_gate", "router.proj"))


def _scale(shape: tuple[int, ...], name: str) -> float:
    width = shape[-1] * GROUP_SIZE
    deviation = (256 if _is_wide(name) else 16) / 12**0.5
    gain = 1.0 if "embed_tokens" in name else 0.5
    return gain / deviation / width**0.5

"""The llama flow: `llama`, `mistral`, `qwen2` and `qwen3`.

One network; the types differ in what their configurations default to, in biases, in norms of the
heads, and in which layers see a window only.

Source: transformers 5.24, models/{llama,mistral,qwen2,qwen3}. Checkpoints:
meta-llama/Llama-3.2-1B, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-0.5B, Qwen/Qwen3-0.6B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import UnsupportedError
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.nn.attention import Attend, HeadNormRope
from turbospark.nn.config import (
    Count,
    Depth,
    Length,
    Positive,
    Size,
    check_heads,
    layer_schedule,
    read_activation,
    read_config,
    split_head_dim,
)
from turbospark.nn.decoder import Cache, CausalLM, Decoder, layer_caches
from turbospark.nn.gguf import BLOCK_NAMES, Metadata, common_config
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.projections import NormedProjections, ProjectedResidual, TokenEmbedding
from turbospark.nn.rope import read_rope
from turbospark.nn.weights import text_weights
from turbospark.protocols import Family, GGUFMapping, Phase

Windows = tuple[int | None, ...]
"""Tokens that each layer's queries see; None for all."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocab_size: Size = 32_000
    hidden_size: Size = 4096
    intermediate_size: Size = 11_008
    num_hidden_layers: Depth = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Length = 2048
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def heads(self) -> HeadGeometry:
        Hq, D = self.num_attention_heads, self.head_dim
        return HeadGeometry(
            Hq, self.num_key_value_heads or Hq, D or split_head_dim(self.hidden_size, Hq)
        )

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.attention_bias

    @property
    def head_norms(self) -> bool:
        return False

    @property
    def windows(self) -> Windows:
        return (None,) * self.num_hidden_layers


@dataclass(frozen=True, slots=True)
class MistralConfig(LlamaConfig):
    intermediate_size: Size = 14_336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Length = 131_072
    sliding_window: Length | None = 4096  # null means none, an absent key does not
    layer_types: tuple[str, ...] | None = None

    @property
    def windows(self) -> Windows:
        wanted = "full_attention" if self.sliding_window is None else "sliding_attention"
        strangers = set(self.layer_types or ()) - {wanted}
        if strangers:
            raise UnsupportedError(
                f"config.json: layer_types with {sorted(strangers)} is not implemented for "
                f"mistral with sliding_window={self.sliding_window}: every layer is {wanted}"
            )
        return (self.sliding_window,) * self.num_hidden_layers


@dataclass(frozen=True, slots=True)
class Qwen2Config(LlamaConfig):
    vocab_size: Size = 151_936
    intermediate_size: Size = 22_016
    num_key_value_heads: Size | None = 32
    max_position_embeddings: Length = 32_768
    use_sliding_window: bool = False
    sliding_window: Length | None = 4096
    max_window_layers: Count = 28
    layer_types: tuple[str, ...] | None = None

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def output_bias(self) -> bool:
        return False

    @property
    def windows(self) -> Windows:
        count, window = self.num_hidden_layers, self.sliding_window
        if self.layer_types is not None:
            slides = [
                kind == "sliding_attention" for kind in layer_schedule(count, self.layer_types, 1)
            ]
        else:
            slides = [i >= self.max_window_layers for i in range(count)]
        if not self.use_sliding_window:
            window = None
        return tuple(window if flag else None for flag in slides)


@dataclass(frozen=True, slots=True)
class Qwen3Config(Qwen2Config):
    head_dim: Size | None = 128

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.attention_bias

    @property
    def head_norms(self) -> bool:
        return True


CONFIGS: Mapping[str, type[LlamaConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, rope: Rope, window: int | None, norm: RMSNorm) -> None:
        super().__init__()
        C, heads, bias = config.hidden_size, config.heads, config.qkv_bias
        D = heads.head_dim
        self.q_proj = Linear(C, heads.num_heads * D, bias)
        self.k_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.v_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.o_proj = Linear(heads.num_heads * D, C, config.output_bias)
        q_norm, k_norm = None, None
        if config.head_norms:
            self.q_norm = q_norm = RMSNorm(D, config.rms_norm_eps)
            self.k_norm = k_norm = RMSNorm(D, config.rms_norm_eps)
        self.project = NormedProjections(norm, [self.q_proj, self.k_proj, self.v_proj])
        self.rotate = HeadNormRope(heads, rope, q_norm=q_norm, k_norm=k_norm)
        self.attend = Attend(heads, scale=D**-0.5, window=window)
        self.output = ProjectedResidual(self.o_proj)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        q, k, v = self.project(h, phase)  # [T, Hq * D], [T, Hkv * D] twice
        q = self.rotate(q, k, v, cache, phase)  # [T, Hq, D]; k and v are rows of the cache
        return self.output(self.attend(q, cache, phase), h, phase)  # [T, C]


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig, rope: Rope, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, rope, window, self.input_layernorm)
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            self.post_attention_layernorm,
            activation=read_activation("hidden_act", config.hidden_act),
            bias=config.mlp_bias,
        )

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        return self.mlp(self.self_attn(h, cache, phase), phase)


class LlamaModel(CausalLM):
    def __init__(self, config: LlamaConfig, rope: Rope) -> None:
        layers = [LlamaLayer(config, rope, window) for window in config.windows]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        decoder = Decoder(config, layers, norm)
        super().__init__(config, decoder, TokenEmbedding(decoder.embed_tokens))
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        heads, windows = self.config.heads, self.config.windows
        return layer_caches([(heads, window) for window in windows], max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return text_weights(weights, tied=self.config.tie_word_embeddings)


def build(raw: Mapping[str, Any]) -> LlamaModel:
    """A model of the llama flow with unset weights; `model_type` says of which kind."""
    kind = CONFIGS.get(raw.get("model_type", "llama"))
    if kind is None:
        raise UnsupportedError(f"model type {raw['model_type']!r} is not of the llama flow")
    config = read_config(kind, raw)
    heads = config.heads
    check_heads(heads.num_heads, heads.num_kv_heads, heads.head_dim)
    return LlamaModel(config, read_rope(raw, heads.head_dim, config.max_position_embeddings))


def gguf_mapping(architecture: str) -> GGUFMapping:
    """How a GGUF file of an architecture of the llama flow reads.

    The metadata of `llama` and `qwen2` do not name a window, and llama.cpp uses none for them.
    """

    def config(metadata: Mapping[str, Any]) -> dict[str, Any]:
        fields = Metadata(metadata, architecture)
        fields.refuse("attention.sliding_window", 0)
        return common_config(fields) | {"model_type": architecture}

    return GGUFMapping(
        config=config,
        names=BLOCK_NAMES | {"blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm"},
        interleaved_rope=("q_proj", "k_proj") if architecture == "llama" else (),
    )


FAMILY = Family(
    name="llama",
    build=build,
    gguf={name: gguf_mapping(name) for name in ("llama", "qwen2", "qwen3")},
)

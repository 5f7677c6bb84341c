"""Gemma 3, text: `gemma3_text`, and the text part of `gemma3`.

Every norm, those of the heads included, is stored as weight - 1. Layers have norms behind their
attention and MLP too. Five of six layers see a window and rotate with a base of their own.

Source: transformers 5.24, models/gemma3. Checkpoint: google/gemma-3-270m.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.nn.attention import RotatedAttention
from turbospark.nn.config import (
    Depth,
    LayerType,
    Length,
    Positive,
    Size,
    check_heads,
    layer_schedule,
    read_activation,
    read_config,
    refuse,
)
from turbospark.nn.decoder import Cache, CausalLM, Decoder, layer_caches
from turbospark.nn.gguf import BLOCK_NAMES, Metadata, common_config
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.projections import NormedProjections, ProjectedResidual
from turbospark.nn.rope import read_rope
from turbospark.nn.sandwich import SandwichLayer
from turbospark.nn.scaled_embedding import ScaledEmbedding
from turbospark.nn.weights import text_weights
from turbospark.protocols import Family, GGUFMapping, Phase

BESIDE_TEXT = ("vision_tower", "multi_modal_projector")


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    vocab_size: Size = 262_208
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Depth = 26
    num_attention_heads: Size = 8
    num_key_value_heads: Size = 4
    head_dim: Size = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Length = 131_072
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Positive = 256
    sliding_window: Length = 4096
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: Depth | None = None
    _sliding_window_pattern: Depth | None = None

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def schedule(self) -> tuple[LayerType, ...]:
        pattern = self.sliding_window_pattern or self._sliding_window_pattern or 6
        return layer_schedule(self.num_hidden_layers, self.layer_types, pattern)

    @property
    def windows(self) -> tuple[int | None, ...]:
        window = self.sliding_window
        return tuple(window if kind == "sliding_attention" else None for kind in self.schedule)


class Gemma3Attention(nn.Module):
    def __init__(
        self, config: Gemma3Config, rope: Rope, window: int | None, norm: RMSNorm, post: RMSNorm
    ) -> None:
        super().__init__()
        C, bias, heads = config.hidden_size, config.attention_bias, config.heads
        D, eps = heads.head_dim, config.rms_norm_eps
        self.q_proj = Linear(C, heads.num_heads * D, bias)
        self.k_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.v_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.o_proj = Linear(heads.num_heads * D, C, bias)
        self.q_norm = RMSNorm(D, eps, offset=1.0)
        self.k_norm = RMSNorm(D, eps, offset=1.0)
        self.project = NormedProjections(norm, [self.q_proj, self.k_proj, self.v_proj])
        self.attend = RotatedAttention(
            heads,
            rope,
            scale=config.query_pre_attn_scalar**-0.5,
            window=window,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )
        self.output = ProjectedResidual(self.o_proj, post)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        q, k, v = self.project(h, phase)  # [T, Hq * D], [T, Hkv * D] twice
        return self.attend(q, k, v, cache, phase)  # [T, Hq * D]; k, v are rows of the cache


class Gemma3Layer(SandwichLayer):
    def __init__(self, config: Gemma3Config, rope: Rope, window: int | None) -> None:
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            lambda norm, post: Gemma3Attention(config, rope, window, norm, post),
            activation=read_activation("hidden_activation", config.hidden_activation),
            eps=config.rms_norm_eps,
            post_eps=config.rms_norm_eps,
        )


class Gemma3Model(CausalLM):
    def __init__(self, config: Gemma3Config, ropes: Mapping[LayerType, Rope]) -> None:
        kinds = zip(config.schedule, config.windows, strict=True)
        layers = [Gemma3Layer(config, ropes[kind], window) for kind, window in kinds]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        decoder = Decoder(config, layers, norm)
        super().__init__(config, decoder, ScaledEmbedding(decoder.embed_tokens, config.hidden_size))
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        heads, windows = self.config.heads, self.config.windows
        return layer_caches([(heads, window) for window in windows], max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return text_weights(weights, BESIDE_TEXT, tied=self.config.tie_word_embeddings)


def build(raw: Mapping[str, Any]) -> Gemma3Model:
    """A Gemma 3 text model with unset weights."""
    config = read_config(Gemma3Config, raw)
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    refuse(raw, "attn_logit_softcapping", why="no release of Gemma 3 caps attention scores")
    refuse(raw, "final_logit_softcapping", why="no release of Gemma 3 caps logits")
    refuse(raw, "use_bidirectional_attention", False, why="text is generated left to right")
    D, longest = config.head_dim, config.max_position_embeddings
    full = read_rope(raw, D, longest, layer_type="full_attention", theta=1e6)
    local = ("rope_local_base_freq",)
    sliding = read_rope(raw, D, longest, layer_type="sliding_attention", flat_keys=local)
    return Gemma3Model(config, {"full_attention": full, "sliding_attention": sliding})


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's fields from the metadata of a GGUF file of architecture `gemma3`.

    What the metadata leaves out is fixed in llama.cpp: one full layer in six, 10,000 as the base
    of sliding layers, scores scaled by the head size but in the largest model.
    """
    fields = Metadata(metadata, "gemma3")
    config = common_config(fields)
    largest = config["num_hidden_layers"] == 62
    return config | {
        "model_type": "gemma3_text",
        "sliding_window": fields.read("attention.sliding_window", Length),
        "sliding_window_pattern": fields.read("attention.sliding_window_pattern", Depth, 6),
        "rope_local_base_freq": fields.read("rope.freq_base_swa", Positive, 10_000.0),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if largest
        else config["head_dim"],
        "attn_logit_softcapping": fields.read("attn_logit_softcapping", Positive, None),
        "final_logit_softcapping": fields.read("final_logit_softcapping", Positive, None),
    }


GGUF = GGUFMapping(
    config=gguf_config,
    names=BLOCK_NAMES
    | {
        "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
        "blk.{i}.ffn_norm": "model.layers.{i}.pre_feedforward_layernorm",
        "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
    norm_offset=1.0,
)

FAMILY = Family(name="gemma3", build=build, gguf={"gemma3": GGUF})

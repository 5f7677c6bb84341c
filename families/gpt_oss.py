"""gpt_oss: OpenAI's open-weight models, routed experts in MXFP4.

Every head's softmax has one more score, its sink, which adds no value; every other layer sees a
window only, the first one among them. RoPE is YaRN whose ramp is not rounded to whole pairs.

Source: transformers 5.24, models/gpt_oss. Checkpoints: openai/gpt-oss-20b, openai/gpt-oss-120b.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import CheckpointError, ConfigError
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import ClampedSwiGLU, QuantizedWeight
from turbospark.nn.attention import RotatedAttention, Sinks
from turbospark.nn.config import (
    Depth,
    Length,
    Positive,
    Range,
    Size,
    check_heads,
    expert_count,
    layer_schedule,
    read_config,
    refuse,
)
from turbospark.nn.decoder import Cache, CausalLM, Decoder, layer_caches
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.moe import Experts, PlainRouter, RoutedExperts
from turbospark.nn.projections import NormedProjections, ProjectedResidual, TokenEmbedding
from turbospark.nn.rope import read_rope
from turbospark.nn.weights import alternate_rows, text_weights
from turbospark.protocols import Family, Phase

THETA = 150_000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_Experts = Annotated[int, Range(1, 2**16)]


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    vocab_size: Size = 201_088
    hidden_size: Size = 2880
    intermediate_size: Size = 2880
    num_hidden_layers: Depth = 36
    num_attention_heads: Size = 64
    num_key_value_heads: Size = 8
    head_dim: Size = 64
    max_position_embeddings: Length = 131_072
    rms_norm_eps: Positive = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = True
    sliding_window: Length = 128
    layer_types: tuple[str, ...] | None = None
    num_local_experts: _Experts = 128
    num_experts_per_tok: _Experts = 4
    swiglu_alpha: Positive = 1.702
    swiglu_limit: Positive = 7.0

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer's queries see; None for all."""
        kinds = layer_schedule(self.num_hidden_layers, self.layer_types, pattern=2)
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)


class GptOssAttention(nn.Module):
    def __init__(self, config: GptOssConfig, rope: Rope, window: int | None, norm: RMSNorm) -> None:
        super().__init__()
        C, heads, bias = config.hidden_size, config.heads, config.attention_bias
        D = heads.head_dim
        self.q_proj = Linear(C, heads.num_heads * D, bias)
        self.k_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.v_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.o_proj = Linear(heads.num_heads * D, C, bias)
        self.sinks = Sinks(heads.num_heads)
        self.project = NormedProjections(norm, [self.q_proj, self.k_proj, self.v_proj])
        self.attend = RotatedAttention(heads, rope, scale=D**-0.5, window=window, sinks=self.sinks)
        self.output = ProjectedResidual(self.o_proj)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        q, k, v = self.project(h, phase)  # [T, Hq * D], [T, Hkv * D] twice
        attended = self.attend(q, k, v, cache, phase)  # [T, Hq * D]; k, v are rows of the cache
        return self.output(attended, h, phase)  # [T, C]


class GptOssMLP(nn.Module):
    """Experts ranked by biased scores; weights are the softmax over the chosen ones."""

    def __init__(self, config: GptOssConfig, norm: RMSNorm) -> None:
        super().__init__()
        C, E = config.hidden_size, config.num_local_experts
        self.router = Linear(C, E, bias=True)
        self.experts = Experts(E, C, config.intermediate_size, bias=True)
        self.routed = RoutedExperts(
            PlainRouter(norm, self.router),
            self.experts,
            top_k=config.num_experts_per_tok,
            activation=ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit),
            norm=norm,
        )

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Advance the stream h [T, C]."""
        return self.routed.advance(h, phase)


class GptOssLayer(nn.Module):
    def __init__(self, config: GptOssConfig, rope: Rope, window: int | None) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(C, eps), RMSNorm(C, eps)
        self.self_attn = GptOssAttention(config, rope, window, self.input_layernorm)
        self.mlp = GptOssMLP(config, self.post_attention_layernorm)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        return self.mlp(self.self_attn(h, cache, phase), phase)


class GptOssModel(CausalLM):
    def __init__(self, config: GptOssConfig, rope: Rope) -> None:
        layers = [GptOssLayer(config, rope, window) for window in config.windows]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        decoder = Decoder(config, layers, norm)
        super().__init__(config, decoder, TokenEmbedding(decoder.embed_tokens))
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        heads, windows = self.config.heads, self.config.windows
        return layer_caches([(heads, window) for window in windows], max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The model's names; MXFP4 codes and scales stay what they are."""
        text = text_weights(weights, tied=self.config.tie_word_embeddings)
        found: dict[str, Any] = {}
        for name, value in text.items():
            if name.endswith(".self_attn.sinks"):
                found[f"{name}.weight"] = value
            elif ".mlp.experts." in name:
                found.update(_expert(name, value, text))
            else:
                found[name] = value
        return found


def _expert(name: str, value: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """A tensor of a layer's experts as transformers stores it, under this model's names.

    Rows of gate and up alternate. Float matrices lie [E, K, N] there, MXFP4 ones [E, N, K].
    """
    stem, _, leaf = name.rpartition(".")
    matrix, _, part = leaf.partition("_proj")
    if matrix not in ("gate_up", "down") or part not in ("", "_blocks", "_scales", "_bias"):
        return {name: value}
    if part == "_scales":  # read with their blocks
        return {} if f"{stem}.{matrix}_proj_blocks" in weights else {name: value}
    if part == "_bias":
        if matrix == "down":
            return {f"{stem}.down_proj.bias": value}
        gate, up = (value[..., side::2] for side in (0, 1))
        return {f"{stem}.gate_proj.bias": gate, f"{stem}.up_proj.bias": up}
    weight = value.swapaxes(-1, -2) if part == "" else _mxfp4(name, value, weights)
    if matrix == "down":
        return {f"{stem}.down_proj.weight": weight}
    gate, up = alternate_rows(name, weight)
    return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}


def _mxfp4(name: str, blocks: mx.array, weights: Mapping[str, Any]) -> QuantizedWeight:
    """Blocks [E, N, K / 32, 16] uint8, low nibble first, with their scales [E, N, K / 32]."""
    scales = weights.get(name.removesuffix("_blocks") + "_scales")
    if scales is None:
        raise CheckpointError(f"{name!r} has no {name.removesuffix('_blocks') + '_scales'!r}")
    if blocks.ndim != 4 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise CheckpointError(
            f"{name!r}: blocks {blocks.shape} and scales {scales.shape} do not belong together"
        )
    if {blocks.dtype, scales.dtype} != {mx.uint8}:
        raise CheckpointError(f"{name!r}: {blocks.dtype} and {scales.dtype} are not both uint8")
    # Four bytes in a row are one of MLX's words.
    codes = mx.flatten(blocks, -2, -1).view(mx.uint32)
    return QuantizedWeight(codes, scales, None, bits=4, group_size=32, mode="mxfp4")


def build(raw: Mapping[str, Any]) -> GptOssModel:
    """A gpt_oss model with unset weights."""
    config = read_config(GptOssConfig, expert_count(raw))
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    refuse(raw, "hidden_act", "silu", why="the experts' gates have a formula of their own")
    if config.num_experts_per_tok > config.num_local_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok={config.num_experts_per_tok} is more than the "
            f"{config.num_local_experts} experts there are"
        )
    described = any(raw.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    parameters = raw if described else {**raw, "rope_scaling": YARN}
    D, longest = config.head_dim, config.max_position_embeddings
    return GptOssModel(config, read_rope(parameters, D, longest, theta=THETA))


FAMILY = Family(name="gpt_oss", build=build)

"""Spark 2.5: layers with a window and full ones, each kind with a rotary embedding of its own.

Full layers rotate a part of a head. A gate, one number a head, is multiplied to what the head
attended to. The MLP's activation is GELU itself, not its approximation by a tanh.

Source: XHToken/Spark-X2.5-4B and its reader in mlx-lm 0.32.2 (transformers has none).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import CheckpointError, ConfigError
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Weight
from turbospark.nn.attention import RotatedAttention
from turbospark.nn.config import (
    Depth,
    LayerType,
    Length,
    Positive,
    Size,
    check_heads,
    layer_schedule,
    read_config,
    refuse,
)
from turbospark.nn.decoder import Cache, CausalLM, Decoder, layer_caches
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.projected_mlp import ProjectedMLP
from turbospark.nn.projections import NormedProjections, ProjectedResidual, TokenEmbedding
from turbospark.nn.rope import read_rope
from turbospark.nn.weights import rows_of, text_weights
from turbospark.protocols import Family, Phase


@dataclass(frozen=True, slots=True)
class SparkConfig:
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    sliding_window: Length
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: Length = 8192
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = True
    layer_types: tuple[str, ...] | None = None

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def schedule(self) -> tuple[LayerType, ...]:
        return layer_schedule(self.num_hidden_layers, self.layer_types, pattern=4)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer's queries see; None for all."""
        window = self.sliding_window
        return tuple(window if kind == "sliding_attention" else None for kind in self.schedule)


class SparkAttention(nn.Module):
    def __init__(self, config: SparkConfig, rope: Rope, window: int | None, norm: RMSNorm) -> None:
        super().__init__()
        C, heads = config.hidden_size, config.heads
        D = heads.head_dim
        self.q_proj = Linear(C, heads.num_heads * D)
        self.k_proj = Linear(C, heads.num_kv_heads * D)
        self.v_proj = Linear(C, heads.num_kv_heads * D)
        self.g_proj = Linear(C, heads.num_heads)
        self.o_proj = Linear(heads.num_heads * D, C)
        self.project = NormedProjections(norm, [self.q_proj, self.k_proj, self.v_proj])
        # By itself: it has another layout than the others where those are quantized.
        self.score = NormedProjections(norm, [self.g_proj])
        self.attend = RotatedAttention(heads, rope, scale=D**-0.5, window=window)
        self.output = ProjectedResidual(self.o_proj)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        q, k, v = self.project(h, phase)  # [T, Hq * D], [T, Hkv * D] twice
        (scores,) = self.score(h, phase)  # [T, Hq]
        return self.attend(q, k, v, cache, phase, scores)  # [T, Hq * D]; k, v are cached


class SparkLayer(nn.Module):
    def __init__(self, config: SparkConfig, rope: Rope, window: int | None) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(C, eps), RMSNorm(C, eps)
        self.self_attn = SparkAttention(config, rope, window, self.input_layernorm)
        self.mlp = MLP(
            C, config.intermediate_size, self.post_attention_layernorm, activation="gelu_erf"
        )
        self.finish = ProjectedMLP(self.self_attn.output, self.mlp)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        attended = self.self_attn(h, cache, phase)  # [T, Hq * D]
        return self.finish(attended, h, phase)  # [T, C]


class SparkModel(CausalLM):
    def __init__(self, config: SparkConfig, ropes: Mapping[LayerType, Rope]) -> None:
        kinds = zip(config.schedule, config.windows, strict=True)
        layers = [SparkLayer(config, ropes[kind], window) for kind, window in kinds]
        decoder = Decoder(config, layers, RMSNorm(config.hidden_size, config.rms_norm_eps))
        super().__init__(config, decoder, TokenEmbedding(decoder.embed_tokens))
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        heads, windows = self.config.heads, self.config.windows
        return layer_caches([(heads, window) for window in windows], max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The model's names; queries, keys and values apart from each other."""
        found: dict[str, Any] = {}
        for name, value in text_weights(weights, tied=self.config.tie_word_embeddings).items():
            name = name.replace("model.embedding.", "model.embed_tokens.", 1)
            name = name.replace(".self_attn.out_proj.", ".self_attn.o_proj.")
            if name.endswith(".q_k_v_proj.weight"):
                found.update(_apart(name, value, self.config.heads))
            else:
                found[name] = value
        return found


def _apart(name: str, weight: Weight, heads: HeadGeometry) -> dict[str, Weight]:
    """The rows of queries, keys and values, which lie in this order.

    Raises:
        CheckpointError: they are not as many as the heads have.
    """
    queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    if weight.shape[0] != queries + 2 * keys:
        raise CheckpointError(
            f"{name} has {weight.shape[0]} rows, where {heads.num_heads} + 2 * "
            f"{heads.num_kv_heads} heads of {heads.head_dim} have {queries + 2 * keys}"
        )
    ends = {"q_proj": queries, "k_proj": queries + keys, "v_proj": queries + 2 * keys}
    parts: dict[str, Weight] = {}
    start = 0
    for leaf, end in ends.items():
        parts[name.replace("q_k_v_proj", leaf)] = rows_of(weight, start, end)
        start = end
    return parts


def build(raw: Mapping[str, Any]) -> SparkModel:
    """A Spark 2.5 model with unset weights."""
    config = read_config(SparkConfig, raw)
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    refuse(raw, "hidden_act", "gelu", why="every release of the family uses GELU")
    refuse(raw, "headwise_attn_output_gate", True, why="every layer gates its heads")
    refuse(raw, "gate_attn_act_mode", "sigmoid", why="gates of heads are sigmoids")
    refuse(raw, "attention_bias", False, why="no release of the family has biases")
    refuse(raw, "mlp_bias", False, why="no release of the family has biases")
    refuse(raw, "rope_scaling", {}, why="rope_parameters describes RoPE, kind by kind of layer")
    return SparkModel(
        config, {kind: _rope(raw, config, kind) for kind in sorted(set(config.schedule))}
    )


def _rope(raw: Mapping[str, Any], config: SparkConfig, kind: LayerType) -> Rope:
    if not config.rope_parameters.get(kind):
        raise ConfigError(f"config.json: rope_parameters lacks {kind}, which layer_types names")
    described = {"rope_parameters": raw["rope_parameters"]}
    longest = config.max_position_embeddings
    return read_rope(described, config.head_dim, longest, layer_type=kind, share=1.0)


FAMILY = Family(name="spark2_5", build=build)

"""The network of muse_glimmer.

Three layers see a window and rotate, the fourth sees everything and knows no positions. Norms of
table rows, queries and keys have no weights. Attention is gated number by number; the norms behind
attention and MLP have an epsilon of their own. The layers' norms are stored as weight - 1, the
final one is not.

Source: transformers 5.24, models/muse_glimmer. Checkpoint: meta-models/Muse-Glimmer-30B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm
from turbospark.nn.attention import RotatedAttention
from turbospark.nn.config import (
    Depth,
    Length,
    Positive,
    Range,
    Size,
    check_heads,
    layer_schedule,
    read_activation,
    read_config,
)
from turbospark.nn.decoder import Cache, CausalLM, Decoder, layer_caches
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.projections import NormedProjections, ProjectedResidual, TokenEmbedding
from turbospark.nn.rope import read_rope
from turbospark.nn.sandwich import SandwichLayer
from turbospark.nn.weights import text_weights
from turbospark.protocols import Phase

BESIDE_TEXT = ("vision_tower", "vision_adapter", "vision_projection")
THETA = 10_000.0
ROPE_KEYS = ("rope_parameters", "rope_scaling")
PERIOD = 4
"""One layer in so many is full, counted back from the last, where config.json lists no layers."""

_Base = Annotated[float, Range(0.0, 1e30)]


@dataclass(frozen=True, slots=True)
class MuseGlimmerConfig:
    vocab_size: Size = 202_048
    hidden_size: Size = 6656
    intermediate_size: Size = 19_968
    num_hidden_layers: Depth = 52
    num_attention_heads: Size = 32
    num_key_value_heads: Size = 2
    head_dim: Size = 128
    hidden_activation: str = "silu"
    max_position_embeddings: Length = 131_072
    rms_norm_eps: Positive = 1e-5
    post_norm_eps: Positive = 1e-8
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: Length = 2048
    layer_types: tuple[str, ...] | None = None
    layer_rope_theta: tuple[_Base, ...] | None = None
    qk_scale_factor: Positive = 3.87
    output_multiplier: Positive = 0.19611613513818404
    final_logit_softcapping: Positive = 20.0

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer's queries see; None for all."""
        listed = self.layer_types or [
            "full_attention" if full else "sliding_attention" for full in self._fourth
        ]
        kinds = layer_schedule(self.num_hidden_layers, listed, PERIOD)
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)

    def rotates(self, theta: float) -> tuple[bool, ...]:
        """Which layers rotate, all of them with base `theta`.

        Raises:
            ConfigError: the list has another length.
            UnsupportedError: a layer has a base of its own.
        """
        bases = self.layer_rope_theta
        if bases is None:
            return tuple(not full for full in self._fourth)
        if len(bases) != self.num_hidden_layers:
            raise ConfigError(
                f"config.json: layer_rope_theta lists {len(bases)} layers, but "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        for i, base in enumerate(bases):
            if base not in (0, theta):
                raise UnsupportedError(
                    f"config.json: layer_rope_theta[{i}]={base!r} beside rope_theta={theta!r} is "
                    "not implemented: a layer rotates with the model's base, or not at all"
                )
        return tuple(base != 0 for base in bases)

    @property
    def _fourth(self) -> tuple[bool, ...]:
        count = self.num_hidden_layers
        return tuple((count - 1 - i) % PERIOD == 0 for i in range(count))


class MuseGlimmerAttention(nn.Module):
    def __init__(
        self,
        config: MuseGlimmerConfig,
        rope: Rope,
        window: int | None,
        norm: RMSNorm,
        post: RMSNorm,
    ) -> None:
        super().__init__()
        C, bias, heads = config.hidden_size, config.attention_bias, config.heads
        D, unscaled = heads.head_dim, Norm(None, config.rms_norm_eps)
        width = heads.num_heads * D
        self.q_proj = Linear(C, width, bias)
        self.k_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.v_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.gate_proj = Linear(C, width)
        self.o_proj = Linear(width, C, bias)
        inputs = [self.q_proj, self.gate_proj, self.k_proj, self.v_proj]
        self.project = NormedProjections(norm, inputs)
        # The factor of the queries is as well one of their scores.
        scale = config.qk_scale_factor * D**-0.5
        self.attend = RotatedAttention(
            heads, rope, scale=scale, window=window, q_norm=unscaled, k_norm=unscaled
        )
        self.output = ProjectedResidual(self.o_proj, post)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        q, gate, k, v = self.project(h, phase)  # [T, Hq * D] and [T, Hkv * D], twice each
        return self.attend(q, k, v, cache, phase, gate)  # [T, Hq * D]; k, v are cached


class MuseGlimmerLayer(SandwichLayer):
    def __init__(self, config: MuseGlimmerConfig, rope: Rope, window: int | None) -> None:
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            lambda norm, post: MuseGlimmerAttention(config, rope, window, norm, post),
            activation=read_activation("hidden_activation", config.hidden_activation),
            eps=config.rms_norm_eps,
            post_eps=config.post_norm_eps,
        )


class MuseGlimmerModel(CausalLM):
    def __init__(self, config: MuseGlimmerConfig, ropes: tuple[Rope, ...]) -> None:
        each = zip(ropes, config.windows, strict=True)
        layers = [MuseGlimmerLayer(config, rope, window) for rope, window in each]
        decoder = Decoder(config, layers, RMSNorm(config.hidden_size, config.rms_norm_eps))
        super().__init__(
            config,
            decoder,
            TokenEmbedding(decoder.embed_tokens, norm=Norm(None, config.rms_norm_eps)),
            softcap=config.final_logit_softcapping,
            factor=config.output_multiplier,
        )
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        heads, windows = self.config.heads, self.config.windows
        return layer_caches([(heads, window) for window in windows], max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return text_weights(weights, BESIDE_TEXT, tied=self.config.tie_word_embeddings)


def build(raw: Mapping[str, Any]) -> MuseGlimmerModel:
    """A Muse Glimmer text model with unset weights."""
    config = read_config(MuseGlimmerConfig, raw)
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    D, longest = config.head_dim, config.max_position_embeddings
    rope, still = read_rope(raw, D, longest, theta=THETA), Rope.still(D)
    flags = config.rotates(_base(raw))
    return MuseGlimmerModel(config, tuple(rope if flag else still for flag in flags))


def _base(raw: Mapping[str, Any]) -> float:
    """The base of the layers that rotate, in a configuration that `read_rope` accepts."""
    inner = (cast("Mapping[str, Any]", raw.get(key) or {}) for key in ROPE_KEYS)
    return next((place["rope_theta"] for place in (raw, *inner) if place.get("rope_theta")), THETA)

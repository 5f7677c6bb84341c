"""What a qwen3_5 configuration says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import DeltaGeometry, HeadGeometry
from turbospark.nn.config import (
    Count,
    Depth,
    Length,
    Positive,
    Range,
    Size,
    check_heads,
    read_config,
    refuse,
)
from turbospark.nn.rope import read_rope, without_axes
from turbospark.nn.schedule import read_schedule

LayerKind = Literal["linear_attention", "full_attention"]
_KINDS: Mapping[str, LayerKind] = {
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",
}

SHARE = 0.25
"""Of a head that rotates where the configuration does not say."""


@dataclass(frozen=True, slots=True)
class Qwen3_5Config:  # noqa: N801 - the model type's own name
    vocab_size: Size = 248_320
    hidden_size: Size = 4096
    intermediate_size: Size = 12_288
    num_hidden_layers: Depth = 32
    num_attention_heads: Size = 16
    num_key_value_heads: Size = 4
    head_dim: Size = 256
    max_position_embeddings: Length = 32_768
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: Depth = 4
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_key_head_dim: Annotated[int, Range(1, 2**12)] = 128
    linear_value_head_dim: Annotated[int, Range(1, 2**12)] = 128
    linear_conv_kernel_dim: Annotated[int, Range(2, 64)] = 4
    mtp_num_hidden_layers: Count = 0

    @property
    def heads(self) -> HeadGeometry:
        """Of a full layer."""
        return HeadGeometry(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def delta(self) -> DeltaGeometry:
        """Of a linear layer."""
        return DeltaGeometry(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    @property
    def schedule(self) -> tuple[LayerKind, ...]:
        """The kind of every layer: as listed, else every n-th one is full.

        Raises:
            ConfigError: the list has another length.
            UnsupportedError: a kind is unknown, or no layer is linear.
        """
        return read_schedule(
            self.layer_types, self.num_hidden_layers, self.full_attention_interval, _KINDS
        )


@dataclass(frozen=True, slots=True)
class Qwen3_5MoeConfig(Qwen3_5Config):  # noqa: N801
    hidden_size: Size = 2048
    num_hidden_layers: Depth = 40
    num_key_value_heads: Size = 2
    num_experts: Annotated[int, Range(1, 2**16)] = 256
    num_experts_per_tok: Annotated[int, Range(1, 2**16)] = 8
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512


CONFIGS: Mapping[str, type[Qwen3_5Config]] = {
    "qwen3_5": Qwen3_5Config,
    "qwen3_5_text": Qwen3_5Config,
    "qwen3_5_moe": Qwen3_5MoeConfig,
    "qwen3_5_moe_text": Qwen3_5MoeConfig,
}


def read_qwen3_5(raw: Mapping[str, Any]) -> Qwen3_5Config:
    """The configuration of a text model; `model_type` says whether it has experts.

    Raises:
        ConfigError: values are missing, malformed or do not fit each other.
        UnsupportedError: it asks for what no release of the family has.
    """
    kind = CONFIGS.get(raw.get("model_type", "qwen3_5"))
    if kind is None:
        raise UnsupportedError(f"model type {raw['model_type']!r} is not of the qwen3_5 family")
    config = read_config(kind, raw)
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    _check_delta(config)
    if isinstance(config, Qwen3_5MoeConfig) and config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok={config.num_experts_per_tok} is more than "
            f"num_experts={config.num_experts}"
        )
    refuse(raw, "hidden_act", "silu", why="every release of the family uses silu")
    refuse(raw, "attention_bias", False, why="no release of the family has biases")
    refuse(raw, "attn_output_gate", True, why="the query projection holds the gate")
    refuse(raw, "norm_topk_prob", True, why="the weights of the experts chosen sum to 1")
    refuse(raw, "decoder_sparse_step", 1, why="every layer has experts")
    refuse(raw, "mlp_only_layers", [], why="every layer has experts")
    return config


def qwen3_5_rope(raw: Mapping[str, Any], config: Qwen3_5Config) -> Rope:
    """The rotary embedding of text."""
    D, longest = config.head_dim, config.max_position_embeddings
    return read_rope(without_axes(raw), D, longest, share=SHARE)


def _check_delta(config: Qwen3_5Config) -> None:
    heads = config.delta
    if heads.num_value_heads % heads.num_key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads={heads.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={heads.num_key_heads}"
        )
    if heads.channels > 2**24:
        raise ConfigError(f"config.json: {heads} makes a layer too wide to be real")

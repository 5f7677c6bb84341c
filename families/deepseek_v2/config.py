"""What a configuration of deepseek_v2 says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.latent import LatentGeometry
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
from turbospark.nn.moe import ExpertGroups

_Experts = Annotated[int, Range(1, 2**16)]
_GROUPED = "group_limited_greedy"


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    vocab_size: Size = 102_400
    hidden_size: Size = 4096
    intermediate_size: Size = 11_008
    moe_intermediate_size: Size = 1407
    num_hidden_layers: Depth = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Length = 2048
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    first_k_dense_replace: Count = 0
    n_routed_experts: _Experts = 64
    n_shared_experts: Count | None = 2
    num_experts_per_tok: _Experts | None = None
    routed_scaling_factor: Positive = 1.0
    topk_method: str | None = "greedy"
    n_group: _Experts | None = None
    topk_group: _Experts | None = None

    @property
    def sizes(self) -> LatentGeometry:
        return LatentGeometry(
            self.num_attention_heads,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.qk_nope_head_dim,
            self.v_head_dim,
        )

    @property
    def shared_size(self) -> int:
        """Width of the shared experts, which are one MLP; 0 where there are none."""
        return self.moe_intermediate_size * (self.n_shared_experts or 0)

    @property
    def top_k(self) -> int:
        """Experts that a row is sent to."""
        assert self.num_experts_per_tok is not None  # `read_deepseek` has seen to it
        return self.num_experts_per_tok

    @property
    def groups(self) -> ExpertGroups | None:
        """How experts of a row are limited, if they are."""
        if self.topk_method != _GROUPED:
            return None
        return ExpertGroups(cast("int", self.n_group), cast("int", self.topk_group))

    def feed_forward(self, layer: int) -> Literal["dense", "experts"]:
        """What a layer has behind its attention."""
        return "dense" if layer < self.first_k_dense_replace else "experts"


def read_deepseek(raw: Mapping[str, Any]) -> DeepseekConfig:
    """Read config.json and refuse what the family does not implement.

    Raises:
        ConfigError: a value is missing, malformed, or contradicts another.
        UnsupportedError: a value is not implemented.
    """
    config = read_config(DeepseekConfig, _renamed(raw))
    heads, sizes = config.num_attention_heads, config.sizes
    kv_heads = config.num_key_value_heads or heads
    check_heads(heads, kv_heads, config.qk_rope_head_dim)
    if kv_heads != heads:
        raise UnsupportedError(
            f"config.json: num_key_value_heads={kv_heads} is not implemented: every one of the "
            f"{heads} query heads has keys of its own, made of the latent"
        )
    widest = max(heads * sizes.query_dim, sizes.expanded, config.shared_size)
    if widest > 2**24:
        raise ConfigError(f"config.json: a layer of {widest} columns is too wide to be real")
    refuse(raw, "scoring_func", "softmax", why="experts are weighed by a softmax")
    refuse(raw, "norm_topk_prob", False, why="transformers ignores it, the original code does not")
    refuse(raw, "moe_layer_freq", 1, why="transformers ignores it, other readers do not")
    if config.first_k_dense_replace < config.num_hidden_layers:
        _check_experts(config)
    return config


def _renamed(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with its number of experts under the one name that is read."""
    count = raw.get("num_experts")
    if count is None:
        return raw
    if raw.get("n_routed_experts", count) != count:
        raise ConfigError(
            f"config.json: num_experts={count!r} and "
            f"n_routed_experts={raw['n_routed_experts']!r} disagree"
        )
    return {**raw, "n_routed_experts": count}


def _check_experts(config: DeepseekConfig) -> None:
    count, wanted = config.n_routed_experts, config.num_experts_per_tok
    if wanted is None:
        raise ConfigError("config.json lacks num_experts_per_tok, which its experts need")
    if config.topk_method not in ("greedy", _GROUPED):
        raise UnsupportedError(
            f"config.json: topk_method={config.topk_method!r} is not implemented; known: greedy, "
            f"{_GROUPED}"
        )
    available = count
    if config.topk_method == _GROUPED:
        groups, kept = config.n_group, config.topk_group
        if groups is None or kept is None or count % groups or kept > groups:
            raise ConfigError(
                f"config.json: n_group={groups!r} and topk_group={kept!r} do not divide "
                f"{count} experts into groups of which some are kept"
            )
        available = count // groups * kept
    if wanted > available:
        raise ConfigError(
            f"config.json: num_experts_per_tok={wanted} is more than the {available} experts "
            "that a row can be sent to"
        )

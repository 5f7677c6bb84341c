"""What a configuration of the llama flow says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.target import HeadGeometry
from turbospark.nn.config import (
    Count,
    Depth,
    Length,
    Positive,
    Range,
    Size,
    check_heads,
    expert_count,
    layer_schedule,
    read_config,
    split_head_dim,
)

Windows = tuple[int | None, ...]
"""Tokens that each layer's queries see; None for all."""

Experts = Annotated[int, Range(0, 2**16)]


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The routed experts that a layer has in place of a dense MLP.

    Attributes:
        count: of all experts.
        top_k: experts that a row is sent to.
        inner: width of an expert's hidden layer.
        renormalise: the weights of a row's experts sum to 1.
    """

    count: int
    top_k: int
    inner: int
    renormalise: bool


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

    @property
    def expert_plans(self) -> tuple[ExpertPlan | None, ...]:
        """The experts of every layer; None where its MLP is dense."""
        return (None,) * self.num_hidden_layers

    @property
    def default_theta(self) -> float:
        """RoPE's base where the configuration has none."""
        return 10_000.0


@dataclass(frozen=True, slots=True)
class MistralConfig(LlamaConfig):
    intermediate_size: Size = 14_336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Length = 131_072
    sliding_window: Length | None = 4096  # null means none, an absent key does not
    layer_types: tuple[str, ...] | None = None

    @property
    def windows(self) -> Windows:
        return _alike("mistral", self, self.sliding_window, self.layer_types)


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


@dataclass(frozen=True, slots=True)
class MixtralConfig(LlamaConfig):
    intermediate_size: Size = 14_336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Length = 131_072
    rms_norm_eps: Positive = 1e-5
    sliding_window: Length | None = None
    layer_types: tuple[str, ...] | None = None
    num_local_experts: Annotated[int, Range(1, 2**16)] = 8
    num_experts_per_tok: Annotated[int, Range(1, 2**16)] = 2

    @property
    def windows(self) -> Windows:
        return _alike("mixtral", self, self.sliding_window, self.layer_types)

    @property
    def expert_plans(self) -> tuple[ExpertPlan | None, ...]:
        plan = ExpertPlan(
            self.num_local_experts, self.num_experts_per_tok, self.intermediate_size, True
        )
        return (plan,) * self.num_hidden_layers

    @property
    def default_theta(self) -> float:
        return 1e6


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig(LlamaConfig):
    vocab_size: Size = 151_936
    hidden_size: Size = 2048
    intermediate_size: Size = 6144
    num_hidden_layers: Depth = 24
    num_key_value_heads: Size | None = 4
    max_position_embeddings: Length = 32_768
    use_sliding_window: bool = False
    sliding_window: Length | None = 4096
    layer_types: tuple[str, ...] | None = None
    num_local_experts: Experts = 128
    num_experts_per_tok: Annotated[int, Range(1, 2**16)] = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Depth = 1
    mlp_only_layers: tuple[int, ...] | None = None

    @property
    def head_norms(self) -> bool:
        return True

    @property
    def windows(self) -> Windows:
        window = self.sliding_window if self.use_sliding_window else None
        return _alike("qwen3_moe", self, window, self.layer_types)

    @property
    def expert_plans(self) -> tuple[ExpertPlan | None, ...]:
        plan = ExpertPlan(
            self.num_local_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            self.norm_topk_prob,
        )
        dense = set(self.mlp_only_layers or ())
        return tuple(
            plan if plan.count and i not in dense and (i + 1) % self.decoder_sparse_step == 0
            else None
            for i in range(self.num_hidden_layers)
        )  # fmt: skip


CONFIGS: Mapping[str, type[LlamaConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
}


def read_llama(raw: Mapping[str, Any]) -> LlamaConfig:
    """The configuration of a model of the llama flow; `model_type` says of which kind.

    Raises:
        ConfigError: values are missing, malformed or do not fit each other.
        UnsupportedError: the type is not of this flow, or a value is not implemented.
    """
    kind = CONFIGS.get(raw.get("model_type", "llama"))
    if kind is None:
        raise UnsupportedError(f"model type {raw['model_type']!r} is not of the llama flow")
    config = read_config(kind, expert_count(raw))
    heads = config.heads
    check_heads(heads.num_heads, heads.num_kv_heads, heads.head_dim)
    for plan in filter(None, config.expert_plans):
        if plan.top_k > plan.count:
            raise ConfigError(
                f"config.json: num_experts_per_tok={plan.top_k} is more than the "
                f"{plan.count} experts there are"
            )
    return config


def _alike(
    name: str, config: LlamaConfig, window: int | None, layer_types: tuple[str, ...] | None
) -> Windows:
    """One window for every layer; a list of layer types must say the same."""
    wanted = "full_attention" if window is None else "sliding_attention"
    strangers = set(layer_types or ()) - {wanted}
    if strangers:
        raise UnsupportedError(
            f"config.json: layer_types with {sorted(strangers)} is not implemented for "
            f"{name} with sliding_window={window}: every layer is {wanted}"
        )
    return (window,) * config.num_hidden_layers

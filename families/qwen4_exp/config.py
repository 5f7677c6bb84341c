"""What a qwen4_exp configuration says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.block_sparse import IndexGeometry
from turbospark.kernels.ngram import NgramHash
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import DeltaGeometry, HeadGeometry
from turbospark.kernels.weights import OutputGate
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

LayerKind = Literal["linear_attention", "sparse_attention"]
Small = Annotated[int, Range(1, 2**16)]

SHARE = 0.25
"""Of a head that rotates where the configuration does not say."""

_KINDS: Mapping[str, LayerKind] = {
    "linear_attention": "linear_attention",
    "full_attention": "sparse_attention",  # published files
    "indexed_attention": "sparse_attention",  # transformers
    "qwen_sparse_attention": "sparse_attention",  # mlx-vlm
}


@dataclass(frozen=True, slots=True)
class Qwen4ExpConfig:
    indexer_budget: Size
    eos_token_id: int | tuple[int, ...] | None = None
    vocab_size: Size = 248_320
    hidden_size: Size = 2560
    num_hidden_layers: Depth = 48
    num_attention_heads: Size = 24
    num_key_value_heads: Size = 2
    head_dim: Size = 256
    max_position_embeddings: Length = 32_768
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: Depth = 4
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 48
    linear_key_head_dim: Annotated[int, Range(1, 2**12)] = 128
    linear_value_head_dim: Annotated[int, Range(1, 2**12)] = 128
    linear_conv_kernel_dim: Annotated[int, Range(2, 64)] = 4
    output_gate_type: str | None = None
    num_experts: Small = 512
    num_experts_per_tok: Small = 10
    moe_intermediate_size: Size = 640
    shared_expert_intermediate_size: Size = 640
    hc_count: Annotated[int, Range(2, 64)] = 4
    hc_lowrank: Size = 320
    indexer_n_heads: Small = 4
    indexer_kv_heads: Count = 1
    indexer_head_dim: Annotated[int, Range(1, 2**12)] = 128
    indexer_compress_ratio: Small = 4
    ple_layer_ids: tuple[int, ...] | None = None
    ple_embed_dim: Size | None = None
    ple_conv_kernel_size: Annotated[int, Range(2, 64)] = 4
    ngram_size: Annotated[int, Range(2, 16)] = 3
    heads_per_ngram: Annotated[int, Range(1, 256)] = 8
    ngram_vocab_size_base: Annotated[int, Range(2, 2**31 - 1)] = 20_000_000
    make_ngram_vocab_size_divisible_by: Size = 128
    seed: Annotated[int, Range(0, 2**62)] = 1234
    preshifted_norm_weights: bool = False
    mtp_num_hidden_layers: Count = 0

    @property
    def heads(self) -> HeadGeometry:
        """Of an attention layer."""
        return HeadGeometry(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def index(self) -> IndexGeometry:
        """Of an attention layer."""
        return IndexGeometry(
            self.indexer_n_heads,
            self.indexer_head_dim,
            self.indexer_budget,
            self.indexer_compress_ratio,
        )

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
    def output_gate(self) -> OutputGate:
        """Of a linear layer.

        Raises:
            UnsupportedError: it is neither a sigmoid nor silu.
        """
        match self.output_gate_type:
            case None | "silu":
                return "silu"
            case "sigmoid":
                return "sigmoid"
            case other:
                raise UnsupportedError(
                    f"config.json: output_gate_type={other!r} is not implemented: known gates are "
                    "sigmoid and silu"
                )

    @property
    def streams(self) -> int:
        """Numbers of all residual streams of a row."""
        return self.hc_count * self.hidden_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ends of text; n-grams stop at the first of them."""
        given = self.eos_token_id
        return () if given is None else (given,) if isinstance(given, int) else given

    @property
    def ngram_layers(self) -> tuple[int, ...]:
        """The layers with n-grams, counted from 0; the configuration counts from 1."""
        return tuple(number - 1 for number in sorted(set(self.ple_layer_ids or ())))

    @property
    def ngram_width(self) -> int:
        """Numbers of a token's n-grams together."""
        return self.ple_embed_dim or self.hidden_size

    @property
    def schedule(self) -> tuple[LayerKind, ...]:
        """The kind of every layer: as listed, else every n-th one attends.

        Raises:
            ConfigError: the list has another length.
            UnsupportedError: a kind is unknown, or no layer is linear.
        """
        return read_schedule(
            self.layer_types, self.num_hidden_layers, self.full_attention_interval, _KINDS
        )

    def hashing(self, index: int) -> NgramHash:
        """Of the `index`-th layer with n-grams."""
        return NgramHash.build(
            vocab_size=self.vocab_size,
            ngram_size=self.ngram_size,
            heads_per_ngram=self.heads_per_ngram,
            base=self.ngram_vocab_size_base,
            divisor=self.make_ngram_vocab_size_divisible_by,
            seed=self.seed,
            index=index,
            eos=self.eos_ids[0],
        )


def read_qwen4_exp(raw: Mapping[str, Any]) -> Qwen4ExpConfig:
    """The configuration of a text model.

    Raises:
        ConfigError: values are missing, malformed or do not fit each other.
        UnsupportedError: it asks for what no release of the family has.
    """
    config = read_config(Qwen4ExpConfig, raw)
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    _check_delta(config)
    _check_index(config)
    _check_ngrams(config)
    if config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok={config.num_experts_per_tok} is more than "
            f"num_experts={config.num_experts}"
        )
    refuse(raw, "hidden_act", "silu", why="every release of the family uses silu")
    refuse(raw, "attention_bias", False, why="no release of the family has biases")
    refuse(raw, "attn_output_gate", True, why="the query projection holds the gate")
    refuse(raw, "norm_topk_prob", True, why="the weights of the experts chosen sum to 1")
    return config


def read_ropes(raw: Mapping[str, Any], config: Qwen4ExpConfig) -> tuple[Rope, Rope]:
    """The rotary embeddings of heads, and of index heads: the same frequencies.

    Raises:
        ConfigError: an index head is narrower than what rotates.
    """
    longest = config.max_position_embeddings
    rope = read_rope(without_axes(raw), config.head_dim, longest, share=SHARE)
    pairs, width = len(rope.inv_freq), config.indexer_head_dim
    if 2 * pairs > width:
        raise ConfigError(
            f"config.json: indexer_head_dim={width} is less than the {2 * pairs} dimensions of a "
            "head that rotate"
        )
    return rope, Rope(rope.inv_freq, width, rope.magnitude)


def _check_delta(config: Qwen4ExpConfig) -> None:
    heads = config.delta
    if heads.num_value_heads % heads.num_key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads={heads.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={heads.num_key_heads}"
        )
    if heads.channels > 2**24:
        raise ConfigError(f"config.json: {heads} makes a layer too wide to be real")


def _check_index(config: Qwen4ExpConfig) -> None:
    if config.indexer_kv_heads != 1:
        raise UnsupportedError(
            f"config.json: indexer_kv_heads={config.indexer_kv_heads} is not implemented: "
            "every release of the family has 1"
        )
    if config.indexer_budget % config.indexer_compress_ratio:
        raise ConfigError(
            f"config.json: indexer_budget={config.indexer_budget} is not a multiple of "
            f"indexer_compress_ratio={config.indexer_compress_ratio}"
        )


def _check_ngrams(config: Qwen4ExpConfig) -> None:
    kinds = config.schedule
    if not config.ngram_layers:
        return
    if not config.eos_ids:
        raise ConfigError("config.json: eos_token_id names no token, which n-grams need")
    if not 0 <= config.eos_ids[0] < config.vocab_size:
        raise ConfigError(
            f"config.json: eos_token_id={config.eos_token_id} is none of {config.vocab_size} tokens"
        )
    for layer in config.ngram_layers:
        if not 0 <= layer < len(kinds):
            raise ConfigError(
                f"config.json: ple_layer_ids holds {layer + 1}, but layers are numbered 1 to "
                f"{len(kinds)} there"
            )
        if kinds[layer] != "linear_attention":
            raise UnsupportedError(
                f"config.json: ple_layer_ids holds {layer + 1}, which is no linear_attention "
                "layer: that is not implemented"
            )
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    if config.ngram_width % heads:
        raise ConfigError(
            f"config.json: ple_embed_dim={config.ngram_width} does not divide into {heads} heads "
            "of n-grams"
        )

"""What a DFlash checkpoint's config.json says, checked against the trunk it drafts for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.target import HeadGeometry
from turbospark.nn.config import (
    Count,
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

_NESTED = {
    "block_size", "causal", "conv_group_size", "conv_kernel_size", "draft_window_size",
    "final_logit_softcapping", "input_embedding_scale", "mask_token_id", "num_target_layers",
    "output_multiplier", "runtime_block_size", "selector_rank", "selector_top_k",
    "target_layer_ids",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Fields of config.json and of its `dflash_config`, in one."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Positive
    block_size: Size
    mask_token_id: Count
    max_position_embeddings: Length = 2**31 - 1
    sliding_window: Length | None = None
    layer_types: tuple[str, ...] | None = None
    target_layer_ids: tuple[Count, ...] | None = None
    num_target_layers: Depth | None = None
    conv_kernel_size: Size | None = None
    conv_group_size: Size = 16
    selector_rank: Size | None = None
    selector_top_k: Size | None = None
    causal: bool | None = None
    runtime_block_size: Size | None = None
    draft_window_size: Length | None = None
    input_embedding_scale: Positive = 1.0
    output_multiplier: Positive = 1.0
    final_logit_softcapping: Positive | None = None

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def rows(self) -> int:
        """Rows of a block: the anchor's, and one a proposal."""
        return self.runtime_block_size or self.block_size

    @property
    def schedule(self) -> tuple[LayerType, ...]:
        """Which layers see a window of the context only."""
        return layer_schedule(self.num_hidden_layers, self.layer_types, 1)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None where it sees the whole context."""
        slides = [kind == "sliding_attention" for kind in self.schedule]
        return tuple(self.sliding_window if flag else None for flag in slides)

    def reaches(self, inclusive: bool) -> tuple[int | None, ...]:
        """Rows of the context that a block's first row sees in each layer; None for all.

        A window has its own row among it, but where it is inclusive.
        """
        own = 0 if inclusive else 1
        return tuple(None if window is None else window - own for window in self.windows)

    def is_causal(self, layer: int) -> bool:
        """Whether a block's row sees no later row of the block.

        Where config.json is silent, the layers of the first DFlash are so where they slide.
        """
        if self.causal is not None:
            return self.causal
        return self.conv_kernel_size is None and self.windows[layer] is not None

    def taps(self, target_layers: int) -> tuple[int, ...]:
        """Layers of the trunk whose streams make a context row, in the order of concatenation."""
        if self.target_layer_ids is not None:
            return self.target_layer_ids
        count, last = self.num_hidden_layers, target_layers - 3
        if count == 1:
            return (target_layers // 2,)
        return tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))


def read_dflash(raw: Mapping[str, Any]) -> DFlashConfig:
    """Read a DFlash checkpoint's config.json.

    Raises:
        ConfigError: a field is missing, malformed, or contradicts another.
        UnsupportedError: a field asks for what is not implemented.
    """
    nested = raw.get("dflash_config")
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config.json: dflash_config={nested!r} must be an object")
    inner = cast("Mapping[str, Any]", nested)
    strangers = sorted(set(inner) - _NESTED)
    if strangers:
        raise UnsupportedError(
            f"config.json: dflash_config holds {strangers[0]}={inner[strangers[0]]!r}, which is "
            "not implemented"
        )
    given = {name: value for name, value in (dict(raw) | dict(inner)).items() if value is not None}
    config = read_config(DFlashConfig, given)
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    refuse(raw, "hidden_act", "silu", why="its MLPs gate with silu")
    refuse(raw, "attention_bias", False, why="its projections have no bias")
    _check(config)
    return config


def _check(config: DFlashConfig) -> None:
    if not 2 <= config.rows <= config.block_size:
        raise ConfigError(
            f"config.json: a block of {config.rows} rows must have 2 to block_size="
            f"{config.block_size}"
        )
    if config.draft_window_size not in {None, config.sliding_window}:
        raise UnsupportedError(
            f"config.json: draft_window_size={config.draft_window_size} beside sliding_window="
            f"{config.sliding_window} is not implemented"
        )
    if "sliding_attention" in config.schedule and (config.sliding_window or 0) < 2:
        raise ConfigError(
            f"config.json: layers that slide need a sliding_window of 2 or more, not "
            f"{config.sliding_window}"
        )
    if config.conv_kernel_size and config.hidden_size % config.conv_group_size:
        raise ConfigError(
            f"config.json: conv_group_size={config.conv_group_size} does not divide "
            f"hidden_size={config.hidden_size}"
        )
    if (config.selector_rank is None) != (config.selector_top_k is None):
        raise ConfigError("config.json: selector_rank and selector_top_k belong together")
    if (config.selector_top_k or 0) > config.vocab_size:
        raise ConfigError(
            f"config.json: selector_top_k={config.selector_top_k} is above vocab_size="
            f"{config.vocab_size}"
        )


def check_trunk(config: DFlashConfig, *, width: int, vocab_size: int, layers: int) -> None:
    """Refuse a trunk that the drafter was not made for.

    Args:
        config: the drafter's.
        width: of the trunk's stream.
        vocab_size: rows of the trunk's table.
        layers: of the trunk.

    Raises:
        ConfigError: naming what differs.
    """
    taps = config.taps(layers)
    faults = [
        f"{name}={own}, the model has {other}"
        for name, own, other in (
            ("hidden_size", config.hidden_size, width),
            ("vocab_size", config.vocab_size, vocab_size),
            ("num_target_layers", config.num_target_layers or layers, layers),
        )
        if own != other
    ]
    faults += [f"target layer {tap}, the model has {layers}" for tap in taps if tap >= layers]
    if config.mask_token_id >= vocab_size:
        faults.append(f"mask_token_id={config.mask_token_id} of a vocabulary of {vocab_size}")
    if faults:
        raise ConfigError(f"the block drafter was made for another model: {'; '.join(faults)}")

"""Checkpoint names of the qwen4_exp family, raw or converted, as the model's own."""

import re
from collections.abc import Mapping
from typing import Any, cast

from families.qwen4_exp.config import Qwen4ExpConfig
from turbospark.errors import CheckpointError
from turbospark.kernels.weights import Weight
from turbospark.nn.expert_weights import expert_weights
from turbospark.nn.weights import (
    WITHOUT_OFFSET,
    average_of_norms,
    gates_apart,
    join_rows,
    text_weights,
    with_offset,
)

BESIDE_TEXT = ("vision_tower", "visual", "mtp")
_SHARD = re.compile(r"(?P<stem>.+\.ngram_embedding)\.(shard_|shards\.)(?P<part>\d+)\.weight")


def trunk_weights(config: Qwen4ExpConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The trunk's tensors under the model's names; idempotent.

    Left out: the vision tower, the layers that predict further tokens (`mtp`), and the numbers
    that the configuration determines.

    Raises:
        CheckpointError: those numbers are others, or parts of a table are missing.
    """
    text = text_weights(weights, BESIDE_TEXT, tied=config.tie_word_embeddings)
    text = joined_tables(without_numbers(config, text))
    raw = holds_offsets(config, text)
    found: dict[str, Any] = {}
    for name, value in layer_weights(config, text).items():
        if name.endswith("conv1d.weight") and value.shape[-1] != 1:
            value = value.swapaxes(-1, -2)  # [channels, 1, taps] as trained
        elif raw and is_offset_norm(name, value):
            value = with_offset(value)
        found[name] = value
    return found


def holds_offsets(config: Qwen4ExpConfig, weights: Mapping[str, Any]) -> bool:
    """Whether norms are stored as trained, which is weight - 1.

    A converted file may say so (`preshifted_norm_weights`); else the vectors themselves tell,
    since some converters add the 1 and some do not.

    Args:
        config: of the model.
        weights: of one file or model: a head's are judged apart from its trunk's.
    """
    if config.preshifted_norm_weights:
        return False
    norms = (value for name, value in weights.items() if is_offset_norm(name, value))
    return average_of_norms(norms) < WITHOUT_OFFSET


def is_offset_norm(name: str, value: Any) -> bool:
    """Whether a tensor is a norm of the kind that is trained as weight - 1."""
    return "norm" in name and len(value.shape) == 1 and "linear_attn" not in name


def layer_weights(config: Qwen4ExpConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Queries apart from their gates, and the experts of a layer stacked; idempotent."""
    found = gates_apart(weights, config.num_attention_heads, config.head_dim)
    return expert_weights(found, config.num_experts)


def joined_tables(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of n-gram tables below one another, in the order of their numbers.

    Raises:
        CheckpointError: a part is missing, or they differ in layout.
    """
    found, tables = dict[str, Any](), dict[str, dict[int, Weight]]()
    for name, value in weights.items():
        match = _SHARD.fullmatch(name)
        if match is None:
            found[name] = value
        else:
            tables.setdefault(match["stem"], {})[int(match["part"])] = value
    for stem, parts in tables.items():
        missing = sorted(set(range(max(parts) + 1)) - parts.keys())
        if missing:
            raise CheckpointError(f"part {missing[0]} of the table {stem} is missing")
        found[f"{stem}.weight"] = join_rows(stem, [parts[i] for i in range(len(parts))])
    return found


def without_numbers(config: Qwen4ExpConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what the configuration determines, once it is the same.

    Raises:
        CheckpointError: a number is another: rows of the table would be those of other n-grams.
    """
    found = dict(weights)
    for index, layer in enumerate(config.ngram_layers):
        hashing, stem = config.hashing(index), f"model.layers.{layer}.ple.ple_embedding."
        wanted = {
            "layer_multipliers": hashing.multipliers,
            "ngram_heads_vocab_sizes": hashing.primes,
            "ngram_heads_offsets": hashing.offsets,
        }
        for name, numbers in wanted.items():
            given = found.pop(stem + name, None)
            if given is None:
                continue
            values = tuple(cast("list[int]", given.tolist()))  # host memory: a few numbers
            if any(values) and values != numbers:  # stand-ins without weights hold zeros
                raise CheckpointError(
                    f"{stem}{name} holds {values[:3]}..., but the configuration (vocab_size, seed, "
                    f"ngram_vocab_size_base) makes {numbers[:3]}..."
                )
    return found

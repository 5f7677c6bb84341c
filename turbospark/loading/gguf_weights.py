"""GGUF tensors under a family's own parameter names, in the order of rows it expects."""

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.errors import CheckpointError, UnsupportedError
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading.arrays import evaluate
from turbospark.loading.checkpoint import some
from turbospark.loading.config import naming
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_rope import DIVISORS, rope_scaling
from turbospark.loading.gguf_types import require_readable
from turbospark.protocols import GGUFMapping

_LAYER = re.compile(r"\.(\d+)\.")
_ARCHITECTURE = "general.architecture"


def architecture(file: GGUFFile) -> str:
    """The `general.architecture` that names the family.

    Raises:
        CheckpointError: the file does not say it.
    """
    value = file.metadata.get(_ARCHITECTURE)
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{file.path} has no {_ARCHITECTURE}, so its family is unknown")
    return value


def gguf_config(file: GGUFFile, mapping: GGUFMapping) -> dict[str, Any]:
    """The family's configuration; what only the tensor table says is added to the metadata's.

    Raises:
        ConfigError: the metadata lacks a field or holds an unusable value.
    """
    with naming(file.path):
        config = mapping.config(file.metadata)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    table = file.tensors.get("token_embd.weight")
    if table is not None:
        config.setdefault("vocab_size", table.shape[0])
    if DIVISORS in file.tensors:
        config["rope_scaling"] = rope_scaling(file, config)
    return config


def parameter_names(file: GGUFFile, mapping: GGUFMapping) -> dict[str, str]:
    """GGUF tensor name to parameter name.

    Raises:
        UnsupportedError: the mapping does not know a tensor; the file itself is whole.
    """
    names: dict[str, str] = {}
    strangers: list[str] = []
    for name in file.tensors:
        if name == DIVISORS:  # it went into the configuration
            continue
        stem, _, kind = name.rpartition(".")
        layer = _LAYER.search(stem + ".")
        index = layer[1] if layer else ""
        pattern = _LAYER.sub(".{i}.", stem + ".", count=1).removesuffix(".")
        path = mapping.names.get(pattern)
        if path is None or kind not in {"weight", "bias"}:
            strangers.append(name)
            continue
        names[name] = f"{path.replace('{i}', index)}.{kind}"
    if strangers:
        raise UnsupportedError(
            f"{file.path} is whole but holds {len(strangers)} tensors that the family of "
            f"{architecture(file)!r} does not know: {some(strangers, 4)}"
        )
    return names


def gguf_weights(
    file: GGUFFile,
    mapping: GGUFMapping,
    config: dict[str, Any],
    *,
    dequantize: bool = False,
    count: Callable[[int], None] = lambda _: None,
) -> dict[str, Weight]:
    """Read every tensor under its parameter name.

    Args:
        file: the open file.
        mapping: names, row order and norm offset of its architecture.
        config: as `gguf_config` gave it; the numbers of heads are read from it.
        dequantize: allow types without a lossless layout to become float32.
        count: called with the bytes of each tensor once it is read.

    Raises:
        UnsupportedError: a tensor or its type is not implemented; before anything is read.
    """
    names = parameter_names(file, mapping)
    for tensor in file.tensors.values():
        require_readable(tensor.type, f"{file.path}: tensor {tensor.name!r}", dequantize)
    weights: dict[str, Weight] = {}
    for name, parameter in names.items():
        weights[parameter] = _restored(
            file.read(name, dequantize), parameter, mapping, config, f"{file.path}: {name!r}"
        )
        count(file.tensors[name].nbytes)
    return weights


def _restored(
    weight: Weight, parameter: str, mapping: GGUFMapping, config: dict[str, Any], where: str
) -> Weight:
    """Undo what the converter to GGUF did to a tensor."""
    path = parameter.rpartition(".")[0]
    if path.endswith(mapping.interleaved_rope) and mapping.interleaved_rope:
        heads = config["num_key_value_heads" if "k_proj" in path else "num_attention_heads"]
        return _half_split_rows(weight, heads, where)
    if mapping.norm_offset and path.endswith("norm") and isinstance(weight, mx.array):
        weight = weight.astype(mx.float32) - mapping.norm_offset
        evaluate(weight)
    return weight


def _half_split_rows(weight: Weight, heads: int, where: str) -> Weight:
    """Rows of every head from (pair, half) order back to (half, pair)."""
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{where} has {rows} rows, which {heads} heads cannot share")
    order = np.arange(rows, dtype=np.uint32).reshape(heads, rows // heads // 2, 2)
    index = mx.array(order.swapaxes(1, 2).reshape(-1))
    return map_rows(weight, lambda part: part[index])


def map_rows(weight: Weight, change: Callable[[mx.array], mx.array]) -> Weight:
    """Apply a change of rows to a dense array, or to each part of a quantized one; evaluated."""
    if not isinstance(weight, QuantizedWeight):
        result = change(weight)
        evaluate(result)
        return result
    codes, scales = change(weight.codes), change(weight.scales)
    biases = None if weight.biases is None else change(weight.biases)
    evaluate(*(part for part in (codes, scales, biases) if part is not None))
    return QuantizedWeight(
        codes, scales, biases, weight.bits, weight.group_size, weight.zero, weight.mode
    )

"""A checkpoint whose files are checked and whose model is built, before its weights are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import UnsupportedError
from turbospark.kernels.weights import Weight
from turbospark.loading import config as configs
from turbospark.loading.checkpoint import load_arrays, naming_files, read_checkpoint, where_of
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_blocks import LAYOUTS
from turbospark.loading.gguf_weights import architecture, gguf_config, gguf_weights
from turbospark.loading.install import parameter_slots
from turbospark.loading.quantized import WidthOf, assemble, matrix_path
from turbospark.loading.safetensors import Slot
from turbospark.loading.source import Source
from turbospark.loading.tables import leave_tables
from turbospark.protocols import CausalModel, Family, GGUFMapping
from turbospark.registry import GGUF_GROUP, resolve_family
from turbospark.tokenizer.front import Tokenizer
from turbospark.tokenizer.gguf import tokenizer_from_gguf
from turbospark.tokenizer.load import load_tokenizer

Count = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """Everything of a checkpoint but its weights.

    Attributes:
        source: the folder or file.
        where: the files, for messages.
        model: the family's model with unset weights.
        config: the text part of config.json, or what GGUF metadata says in its words.
        tokenizer: the checkpoint's own.
        stop_ids: ids that end a text, by the configuration; the tokenizer may know more.
        is_quantized: whether its matrices are quantized.
        file_bytes: bytes of all tensors that are read.
        is_lazy: whether `weights` only prepares reading; then its counter is never called.
        weights: read (or prepare) the weights under the model's own names; the argument is called
            with the bytes of each tensor that was read.
        left: tensors of tables that stay in the files.
    """

    source: Path
    where: str
    model: nn.Module
    config: dict[str, Any]
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    is_quantized: bool
    file_bytes: int
    is_lazy: bool
    weights: Callable[[Count], dict[str, Weight]]
    left: Mapping[str, Slot] = field(default_factory=dict[str, Slot])


def open_checkpoint(source: Source, dequantize: bool = False) -> Opened:
    """Read configuration, tokenizer and headers, and build the model.

    Raises:
        ConfigError: the configuration is damaged or not implemented.
        CheckpointError: a file is damaged or missing.
        TokenizerError: the tokenizer is damaged.
    """
    return _open_gguf(source, dequantize) if source.kind == "gguf" else _open_folder(source)


def _open_folder(source: Source) -> Opened:
    folder = source.path
    path = folder / "config.json"
    raw = configs.read_config(folder)
    config = configs.normalise(raw, path)
    quantization = configs.quantization(config, path)
    stop_ids = configs.stop_ids(folder, raw)
    model = build_model(folder_family(raw, path), config, path)
    slots = read_checkpoint(folder)
    where = where_of(folder, slots)
    read = leave_tables(model, slots)

    def weights(_: Count) -> dict[str, Weight]:
        return sanitized(model, load_arrays(read), quantization, path, where)

    return Opened(
        source=folder,
        where=where,
        model=model,
        config=config,
        tokenizer=load_tokenizer(folder, config),
        stop_ids=stop_ids,
        is_quantized=any(name.endswith((".scales", "_blocks")) for name in slots),
        file_bytes=sum(slot.nbytes for slot in read.values()),
        is_lazy=True,
        weights=weights,
        left={name: slot for name, slot in slots.items() if name not in read},
    )


def _open_gguf(source: Source, dequantize: bool) -> Opened:
    file = GGUFFile(source.path)
    family, mapping = gguf_family(file)
    config = gguf_config(file, mapping)
    model = build_model(family, config, source.path)

    def weights(count: Count) -> dict[str, Weight]:
        read = gguf_weights(file, mapping, config, dequantize=dequantize, count=count)
        return cast("CausalModel", model).sanitize(read)

    matrices = [item.type.name for item in file.tensors.values() if len(item.shape) > 1]
    return Opened(
        source=source.path,
        where=str(source.path),
        model=model,
        config=config,
        tokenizer=tokenizer_from_gguf(file.metadata, str(source.path)),
        stop_ids=frozenset(),
        is_quantized=bool(matrices) and all(kind in LAYOUTS for kind in matrices),
        file_bytes=file.nbytes,
        is_lazy=False,
        weights=weights,
    )


def read_tokenizer(source: Source, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        source: the checkpoint.
        config: normalised.

    Raises:
        TokenizerError: it is damaged, or there is none.
    """
    if source.kind == "gguf":
        return tokenizer_from_gguf(GGUFFile(source.path).metadata, str(source.path))
    return load_tokenizer(source.path, config)


def folder_family(raw: Mapping[str, Any], path: Path) -> Family:
    """The family of a config.json.

    Raises:
        UnsupportedError: none is registered for its model_type.
    """
    with configs.naming(path):
        return resolve_family(raw["model_type"])


def gguf_family(file: GGUFFile) -> tuple[Family, GGUFMapping]:
    """The family of a GGUF file, and its mapping.

    Raises:
        UnsupportedError: no family reads this architecture.
    """
    name = architecture(file)
    with configs.naming(file.path):
        family = resolve_family(name, GGUF_GROUP)
    if name not in family.gguf:
        raise UnsupportedError(
            f"{file.path}: the family {family.name!r} has no GGUF mapping for {name!r}"
        )
    return family, family.gguf[name]


def build_model(family: Family, config: Mapping[str, Any], path: Path) -> nn.Module:
    """A family's model with unset weights: a CausalModel that is also an mlx.nn.Module.

    Args:
        family: as the registry gave it.
        config: normalised.
        path: the file it came from, for messages.

    Raises:
        ConfigError: a field is missing, malformed or not implemented.
    """
    with configs.naming(path):
        return cast("nn.Module", family.build(config))


def sanitized(
    model: nn.Module,
    arrays: Mapping[str, mx.array],
    quantization: Mapping[str, Any] | None,
    config_path: Path,
    where: str,
) -> dict[str, Weight]:
    """Checkpoint tensors as the model names them, quantized ones joined; nothing is evaluated.

    Args:
        model: with unset weights.
        arrays: by the names they are stored under.
        quantization: what config.json says of it.
        config_path: that file.
        where: the files of the tensors, for messages.

    Raises:
        CheckpointError: they are not those of the configuration.
    """
    with naming_files(where, str(config_path)):
        weights = assemble(arrays, quantization, width_of(model), str(config_path))
        return cast("CausalModel", model).sanitize(weights)


def width_of(model: nn.Module) -> WidthOf:
    """The input width of each matrix of a model, by its path without prefixes."""
    widths = {
        matrix_path(name.removesuffix(".weight")): slot.shape[-1]
        for name, slot in parameter_slots(model).items()
        if slot.is_matrix
    }
    return lambda path: widths.get(matrix_path(path))

"""From a path or a Hub id to a model with weights, a tokenizer and bound kernels."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import OptionError, UnsupportedError
from turbospark.kernels.select import choose_kernels, on_cpu
from turbospark.kernels.target import KernelSet
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading import config as configs
from turbospark.loading.checkpoint import INDEX, load_arrays, read_checkpoint
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_weights import architecture, gguf_config, gguf_weights
from turbospark.loading.install import Handling, install_weights, parameter_slots
from turbospark.loading.quantize import Quantization, parse_quantize
from turbospark.loading.quantized import WidthOf, assemble, canonical
from turbospark.loading.source import Source, resolve_source
from turbospark.nn.unit import bind_units
from turbospark.protocols import CausalModel, Family, GGUFMapping
from turbospark.registry import GGUF_GROUP, resolve_family
from turbospark.settings import KernelPolicy, resolve
from turbospark.tokenizer.front import Tokenizer
from turbospark.tokenizer.gguf import tokenizer_from_gguf
from turbospark.tokenizer.load import load_tokenizer

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: the family's model, weights set and units bound.
        config: the text part of config.json, or what GGUF metadata says in its words.
        tokenizer: the checkpoint's own.
        source: the folder or file it came from.
        stop_ids: every id that ends a text: the union of all files that name one.
        kernels: the target whose bodies run.
        bodies: how many units run on which body, by "unit body".
    """

    model: CausalModel
    config: dict[str, Any]
    tokenizer: Tokenizer
    source: Path
    stop_ids: frozenset[int]
    kernels: KernelSet
    bodies: dict[str, int]


def load_model(
    path_or_repo: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    policy: KernelPolicy | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: Progress | None = None,
    dequantize: bool = False,
) -> LoadedModel:
    """Load a checkpoint.

    Args:
        path_or_repo: a folder, a .gguf file, "demo", or a Hub id.
        quantize: quantize float weights while loading: a key of `QUANTIZATIONS`, such as "int4".
        policy: which kernel bodies run; by default what the environment says.
        revision: branch, tag or commit on the Hub.
        local_files_only: never ask the Hub.
        progress: called with bytes done and bytes in all; ends at (total, total).
        dequantize: allow GGUF types without a lossless layout to become float32.

    Raises:
        SourceError: no checkpoint is there.
        ConfigError: its configuration is damaged or not implemented.
        CheckpointError: its weights are damaged or not those of the configuration.
        TokenizerError: its tokenizer is damaged.
        OptionError: `quantize` is unknown, or the weights are quantized already.
        KernelError: the policy cannot be honoured here.
    """
    wish = parse_quantize(quantize)
    kernels = choose_kernels(policy or resolve(KernelPolicy))
    source = resolve_source(
        path_or_repo, revision=revision, local_files_only=local_files_only, progress=progress
    )
    if source.kind == "gguf":
        return _load_gguf(source, wish, kernels, progress, dequantize)
    if dequantize:
        raise OptionError("dequantize=True belongs to GGUF files, and this is a safetensors folder")
    return _load_safetensors(source, wish, kernels, progress)


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


def _load_safetensors(
    source: Source, wish: Quantization | None, kernels: KernelSet, progress: Progress | None
) -> LoadedModel:
    folder = source.path
    path = folder / "config.json"
    raw = configs.read_config(folder)
    with configs.naming(path):
        family = resolve_family(raw["model_type"])
    config = configs.normalise(raw, path)
    quantization = configs.quantization(config, path)
    if wish is not None and quantization is not None:
        raise _already_quantized(folder, wish)
    stop = configs.stop_ids(folder, raw)
    model = build_model(family, config, path)
    slots = read_checkpoint(folder)
    tokenizer = load_tokenizer(folder, config)
    weights = sanitized(model, load_arrays(slots), quantization, path)
    total = sum(slot.nbytes for slot in slots.values())
    meter = Meter(progress, total)
    install_weights(
        model,
        weights,
        _where(folder, len({slot.file for slot in slots.values()})),
        Handling(on_cpu(), wish),
        lambda weight: meter.add(weight.nbytes),
    )
    meter.finish()
    return _finished(model, config, tokenizer, folder, stop, kernels)


def sanitized(
    model: nn.Module,
    arrays: Mapping[str, mx.array],
    quantization: Mapping[str, Any] | None,
    config_path: Path,
) -> dict[str, Weight]:
    """Checkpoint tensors as the model names them, quantized ones joined; nothing is evaluated."""
    weights = assemble(arrays, quantization, width_of(model), str(config_path))
    return cast("CausalModel", model).sanitize(weights)


def width_of(model: nn.Module) -> WidthOf:
    """The input width of each matrix of a model, by its path without prefixes."""
    widths = {
        canonical(name.removesuffix(".weight")): slot.shape[-1]
        for name, slot in parameter_slots(model).items()
        if slot.is_matrix
    }
    return lambda path: widths.get(canonical(path))


def _load_gguf(
    source: Source,
    wish: Quantization | None,
    kernels: KernelSet,
    progress: Progress | None,
    dequantize: bool,
) -> LoadedModel:
    file = GGUFFile(source.path)
    family, mapping = gguf_family(file)
    config = gguf_config(file, mapping)
    model = build_model(family, config, source.path)
    tokenizer = tokenizer_from_gguf(file.metadata, str(source.path))
    meter = Meter(progress, file.nbytes)
    read = gguf_weights(file, mapping, config, dequantize=dequantize, progress=meter.add)
    if wish is not None and all(
        isinstance(weight, QuantizedWeight) for weight in read.values() if len(weight.shape) > 1
    ):
        raise _already_quantized(source.path, wish)
    weights = cast("CausalModel", model).sanitize(read)
    read.clear()
    install_weights(model, weights, str(source.path), Handling(on_cpu(), wish))
    meter.finish()
    return _finished(model, config, tokenizer, source.path, frozenset(), kernels)


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


def _finished(
    model: nn.Module,
    config: dict[str, Any],
    tokenizer: Tokenizer,
    source: Path,
    stop_ids: frozenset[int],
    kernels: KernelSet,
) -> LoadedModel:
    bodies = bind_units(model, kernels)
    stop = stop_ids | tokenizer.eos_ids
    causal = cast("CausalModel", model)
    return LoadedModel(causal, config, tokenizer, source, stop, kernels, bodies)


def _already_quantized(path: Path, wish: Quantization) -> OptionError:
    return OptionError(
        f"quantize={wish.name!r} asks for float weights, but those of {path} are quantized "
        "already: leave the option out, or give an unquantized release of the model"
    )


def _where(folder: Path, num_files: int) -> str:
    if (folder / INDEX).exists():
        return f"{folder} ({num_files} files of {INDEX})"
    return f"{folder} ({num_files} safetensors file{'s' if num_files > 1 else ''})"


class Meter:
    """Counts bytes for a progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        """Report `count` more bytes; never past the total."""
        self._done = min(self._total, self._done + count)
        if self._progress is not None and self._done < self._total:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Report that all is done."""
        if self._progress is not None:
            self._progress(self._total, self._total)

"""From a path or a Hub id to a model with weights, a tokenizer and bound kernels."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turbospark.errors import OptionError
from turbospark.kernels.process import claim_process
from turbospark.kernels.select import choose_kernels
from turbospark.kernels.target import KernelSet
from turbospark.kernels.weights import Weight
from turbospark.loading.install import Handling, install_weights
from turbospark.loading.opened import Opened, open_checkpoint
from turbospark.loading.quantize import parse_quantize
from turbospark.loading.source import resolve_source
from turbospark.nn.decoder import CausalLM
from turbospark.nn.unit import bind_units
from turbospark.protocols import CausalModel
from turbospark.settings import KernelPolicy, resolve
from turbospark.tokenizer.front import Tokenizer

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
        KernelError: the policy cannot be honoured here, or this process was forked from one that
            had loaded a model.
    """
    claim_process()
    wish = parse_quantize(quantize)
    kernels = choose_kernels(policy or resolve(KernelPolicy))
    source = resolve_source(
        path_or_repo, revision=revision, local_files_only=local_files_only, progress=progress
    )
    if dequantize and source.kind != "gguf":
        raise OptionError(f"dequantize=True belongs to GGUF files, and {source.path} is none")
    opened = open_checkpoint(source, dequantize)
    if wish is not None and opened.is_quantized:
        raise OptionError(
            f"quantize={wish.name!r} asks for float weights, but those of {source.path} are "
            "quantized already: leave the option out, or give an unquantized release"
        )
    set_weights(opened, Handling.of(source, wish), progress)
    return LoadedModel(
        model=cast("CausalModel", opened.model),
        config=opened.config,
        tokenizer=opened.tokenizer,
        source=opened.source,
        stop_ids=opened.stop_ids | opened.tokenizer.eos_ids,
        kernels=kernels,
        bodies=bind_units(opened.model, kernels),
    )


def set_weights(opened: Opened, handling: Handling, progress: Progress | None = None) -> None:
    """Read the weights of an opened checkpoint into its model.

    Raises:
        CheckpointError: they cannot be read, or are not those of the model.
    """
    meter = Meter(progress, opened.file_bytes)

    def installed(weight: Weight) -> None:
        if opened.is_lazy:
            meter.add(weight.nbytes)

    install_weights(opened.model, opened.weights(meter.add), opened.where, handling, installed)
    if isinstance(opened.model, CausalLM):
        opened.model.embed.stream = handling.stream
    meter.finish()


class Meter:
    """Counts bytes for a progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        """Report `count` more bytes; the total is left to `finish`."""
        self._done += count
        if self._progress is not None and self._done < self._total:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Report that all is done."""
        if self._progress is not None:
            self._progress(self._total, self._total)

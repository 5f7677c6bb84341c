"""Writing a checkpoint as a folder of MLX-quantized safetensors, and what that costs."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import OptionError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading.arrays import evaluate
from turbospark.loading.build import Meter, Progress, load_model
from turbospark.loading.checkpoint import load_arrays
from turbospark.loading.install import check_fit, parameter_slots, parts_of
from turbospark.loading.losses import Loss, loss
from turbospark.loading.opened import Opened, open_checkpoint
from turbospark.loading.perplexity import SAMPLE, perplexity
from turbospark.loading.planned import megabytes
from turbospark.loading.quantize import (
    QUANTIZATIONS,
    Quantization,
    parse_quantize,
    quantization_for,
    quantize_weight,
    require_divisible,
)
from turbospark.loading.shards import split_names, write_shards
from turbospark.loading.source import Source, resolve_source

COPIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""Files of a folder that are taken over as they are."""

SHARD_BYTES = 5 << 30
"""The size from which on weights are spread over several files."""

_MLX_GROUPS = (32, 64, 128)
_FOREIGN = Quantization(8, 32)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion wrote, and what it cost.

    Attributes:
        source: where the weights came from.
        target: the folder written.
        source_bytes: bytes of all tensors before.
        target_bytes: bytes of all tensors after.
        perplexity_before: of the source on the text, or None where it was not asked for.
        perplexity_after: of the folder written.
        losses: every matrix that was quantized, the one that lost most first.
    """

    source: Path
    target: Path
    source_bytes: int
    target_bytes: int
    perplexity_before: float | None
    perplexity_after: float | None
    losses: tuple[Loss, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self) | {"source": str(self.source), "target": str(self.target)}

    def __repr__(self) -> str:
        ratio = self.target_bytes / max(1, self.source_bytes)
        lines = [
            f"{self.source} -> {self.target}",
            f"  size        {megabytes(self.source_bytes)} -> {megabytes(self.target_bytes)} "
            f"({100 * ratio:.0f} %)",
        ]
        if self.perplexity_before is not None and self.perplexity_after is not None:
            change = self.perplexity_after / self.perplexity_before - 1
            lines.append(
                f"  perplexity  {self.perplexity_before:.3f} -> {self.perplexity_after:.3f} "
                f"({100 * change:+.2f} %)"
            )
        if self.losses:
            lines.append(f"  lost most of {len(self.losses)} quantized matrices:")
            lines += [f"    {item}" for item in self.losses[:5]]
        return "\n".join(lines)


def convert(
    path_or_repo: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    text: str | None = SAMPLE,
    revision: str | None = None,
    local_files_only: bool = False,
    dequantize: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint as MLX-quantized safetensors. The folder appears whole or not at all.

    Float weights are quantized. GGUF blocks keep their codes and scales; only Q6_K, whose groups
    of 16 MLX does not have, becomes 8 bits in groups of 32.

    Args:
        path_or_repo: a float or GGUF checkpoint, as for `load`.
        target: the folder to write; it must not exist, or be empty.
        quantize: a key of `QUANTIZATIONS`; by default "int4" for float weights.
        text: what perplexity is measured on, before and after; None to leave it out.
        revision: branch, tag or commit on the Hub.
        local_files_only: never ask the Hub.
        dequantize: allow GGUF types without a lossless layout.
        progress: called with bytes done and bytes in all; ends at (total, total).

    Raises:
        OptionError: the target is in use, the weights are quantized already, or none of them can
            be quantized so.
        TurbosparkError: the source cannot be loaded.
    """
    wish = parse_quantize(quantize)
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} is there already; choose another folder or remove it")
    source = resolve_source(path_or_repo, revision=revision, local_files_only=local_files_only)
    opened, chosen = _opened(source, wish, dequantize)
    temporary = _folder_beside(folder)
    try:
        before = None
        if text is not None:
            before = perplexity(load_model(source.path, dequantize=dequantize), text)
        written = _write(source, opened, temporary, chosen, progress)
        after = None if text is None else perplexity(load_model(temporary), text)
        temporary.chmod(0o755)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return replace(written, target=folder, perplexity_before=before, perplexity_after=after)


def _folder_beside(folder: Path) -> Path:
    """An empty folder that can take the place of one."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise OptionError(
            f"the folder {folder} cannot be written: {error.strerror or error}; choose another one"
        ) from error


def _opened(
    source: Source, wish: Quantization | None, dequantize: bool
) -> tuple[Opened, Quantization]:
    """A checkpoint that can be converted, and the layout of its float matrices."""
    opened = open_checkpoint(source, dequantize)
    if opened.is_quantized and (wish is not None or source.kind == "safetensors"):
        raise OptionError(
            f"the weights of {source.path} are quantized already; convert an unquantized release "
            "of the model"
        )
    chosen = wish or QUANTIZATIONS["int4"]
    if not opened.is_quantized:
        slots = parameter_slots(opened.model)
        widths = (slot.shape[-1] for slot in slots.values() if slot.is_matrix)
        require_divisible(widths, chosen, str(source.path))
    return opened, chosen


def _write(
    source: Source,
    opened: Opened,
    folder: Path,
    chosen: Quantization,
    progress: Progress | None,
) -> Conversion:
    weights = opened.weights(lambda _: None)
    check_fit(parameter_slots(opened.model), weights, str(source.path))
    weights |= load_arrays(opened.left)
    source_bytes = sum(weight.nbytes for weight in weights.values())
    writer = _Writer(opened.model, weights, chosen, progress, opened.left)
    groups = split_names(writer.sizes(), SHARD_BYTES)
    target_bytes = write_shards(folder, groups, writer.arrays_of)
    writer.meter.finish()
    config = dict(opened.config)
    for name in ("quantization", "quantization_config", "text_config"):
        config.pop(name, None)
    if writer.layouts:
        config["quantization"] = quantization_entries(writer.layouts)
    if source.kind == "gguf":
        config["eos_token_id"] = sorted(opened.tokenizer.eos_ids)
        opened.tokenizer.save(folder)
    else:
        for name in COPIED:
            if (source.path / name).exists():
                shutil.copyfile(source.path / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    losses = tuple(sorted(writer.losses, key=lambda item: -item.relative))
    return Conversion(source.path, folder, source_bytes, target_bytes, None, None, losses)


class _Writer:
    """Turns weights into stored tensors one at a time, and remembers layouts and losses."""

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Weight],
        wish: Quantization,
        progress: Progress | None,
        tables: Iterable[str],
    ) -> None:
        self._weights, self._wish = weights, wish
        self._matrices = {name for name, slot in parameter_slots(model).items() if slot.is_matrix}
        self._matrices.update(tables)
        self.layouts: dict[str, Quantization] = {}
        self.losses: list[Loss] = []
        self.meter = Meter(progress, sum(weight.nbytes for weight in weights.values()))

    def sizes(self) -> dict[str, int]:
        """Bytes of each weight once stored; nothing is evaluated."""
        return {
            name: sum(part.nbytes for part in parts_of(self._stored(name, weight)))
            for name, weight in self._weights.items()
        }

    def arrays_of(self, name: str) -> Iterator[tuple[str, mx.array]]:
        """The tensors of a weight, evaluated; its source is dropped."""
        weight = self._weights.pop(name)
        stored = self._stored(name, weight)
        evaluate(*parts_of(stored))
        self.meter.add(weight.nbytes)
        if not isinstance(stored, QuantizedWeight):
            yield name, stored
            return
        path = name.removesuffix(".weight")
        self.layouts[path] = Quantization(stored.bits, stored.group_size)
        if stored.codes is not parts_of(weight)[0]:
            self.losses.append(loss(name, dequantize_reference(weight), stored))
        yield name, stored.codes
        yield f"{path}.scales", stored.scales
        if stored.biases is not None:
            yield f"{path}.biases", stored.biases

    def _stored(self, name: str, weight: Weight) -> Weight:
        if isinstance(weight, QuantizedWeight):
            if weight.group_size not in _MLX_GROUPS:
                return quantize_weight(dequantize_reference(weight), _FOREIGN)
            return with_biases(weight)
        if name not in self._matrices:
            return weight
        chosen = quantization_for(name.removesuffix(".weight"), weight.shape[-1], self._wish)
        return weight if chosen is None else quantize_weight(weight, chosen)


def with_biases(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with its biases written out, as MLX stores them."""
    if weight.zero is None or weight.biases is not None:
        return weight
    # A power of two times a float16 is exact.
    biases = weight.scales * mx.array(-float(weight.zero), weight.scales.dtype)
    return replace(weight, biases=biases, zero=None)


def quantization_entries(layouts: Mapping[str, Quantization]) -> dict[str, Any]:
    """config.json's `quantization`: the commonest layout, then every path that differs."""
    common = Counter(layouts.values()).most_common(1)[0][0]
    entries: dict[str, Any] = {
        "group_size": common.group_size,
        "bits": common.bits,
        "mode": "affine",
    }
    for path, layout in layouts.items():
        if layout != common:
            entries[path] = {"group_size": layout.group_size, "bits": layout.bits}
    return entries

"""From what a user asks for to the module of a drafter; no weights are read."""

import glob
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import CheckpointError, ConfigError, OptionError
from turbospark.kernels.weights import Weight
from turbospark.loading import config as configs
from turbospark.loading.checkpoint import load_arrays, naming_files, read_checkpoint
from turbospark.loading.install import Handling, install_weights, parameter_slots
from turbospark.loading.quantized import assemble
from turbospark.loading.safetensors import read_slots
from turbospark.loading.source import Source, resolve_source
from turbospark.protocols import Drafter, DrafterBuilder
from turbospark.registry import resolve_family
from turbospark.speculation.dflash import Blocks, DFlashDrafter
from turbospark.speculation.mtp import Head, MTPDrafter

_PREFIX = "mtp."
_SIGN = "pre_fc_norm_hidden.weight"  # a tensor that only prediction heads have


@dataclass(frozen=True, slots=True, eq=False)
class FoundModule:
    """A drafter's module and the tensors that belong into it.

    Attributes:
        module: the family's, with unset weights.
        arrays: the tensors of its files, not read; those of a trunk may be among them.
        quantization: what config.json says of it.
        where: that file.
        wrap: makes a drafter of the module.
    """

    module: nn.Module
    arrays: Mapping[str, mx.array]
    quantization: Mapping[str, Any] | None
    where: str
    wrap: Callable[[Any], Drafter]

    def weights(self) -> dict[str, Weight]:
        """The module's own tensors by its own names."""
        widths = {
            name.removesuffix(".weight"): slot.shape[-1]
            for name, slot in parameter_slots(self.module).items()
            if slot.is_matrix
        }

        def width_of(path: str) -> int | None:
            tail = f".{path}".rpartition(f".{_PREFIX}")[2]
            return widths.get(tail.removeprefix("."))

        with naming_files(f"the drafter of {self.where}", self.where):
            weights = assemble(self.arrays, self.quantization, width_of, self.where)
            return cast("Any", self.module).sanitize(weights)

    def install(self, handling: Handling) -> None:
        """Set the module's weights."""
        install_weights(self.module, self.weights(), f"the drafter of {self.where}", handling)

    def drafter(self) -> Drafter:
        """A drafter over the module."""
        return self.wrap(self.module)


def find_drafter(
    draft: str | os.PathLike[str],
    config: Mapping[str, Any],
    model: Any,
    source: Path,
    *,
    arrays: Mapping[str, mx.array] | None = None,
    local_files_only: bool = False,
) -> FoundModule | Source | str:
    """The drafter that a wish leads to; no weights are read.

    Args:
        draft: as for `load_drafter`, but neither "off" nor "ngram".
        config: of the model drafted for, normalised.
        model: as its family built it.
        source: its folder or file.
        arrays: the tensors of the folder, or stand-ins of them; by default its files are opened.
        local_files_only: never ask the Hub.

    Returns:
        a module; the place of a draft model; or why "auto" finds nothing.

    Raises:
        TurbosparkError: as for `load_drafter`.
    """
    if draft == "auto":
        try:
            return _own_module(config, model, source, arrays)
        except (CheckpointError, ConfigError) as error:
            return str(error)
    if draft == "mtp":
        head = _own_module(config, model, source, arrays)
        if isinstance(head, str):
            raise OptionError(f"draft='mtp' cannot be had: {head}; use 'auto', 'ngram' or 'off'")
        return head
    if draft == "dflash":
        raise OptionError(
            "draft='dflash' does not say which: give the path or Hub id of the block drafter's "
            "checkpoint"
        )
    if _is_bare_head(Path(draft)):
        return _head_of(config, model, Path(draft))
    place = resolve_source(draft, local_files_only=local_files_only)
    if place.kind == "safetensors":
        raw = configs.read_json(place.path / "config.json")
        if _drafts_blocks(raw):
            return _block_module(config, model, place.path, raw)
        if _is_head(_file_names(place.path)):
            return _head_of(config, model, place.path)
    return place


def drafters_beside(
    config: Mapping[str, Any], folder: Path, used: Container[str]
) -> dict[str, Path]:
    """Drafters of a checkpoint that lie where its publishers put them.

    Args:
        config: the model's, normalised.
        folder: the checkpoint's.
        used: files of it that hold the model.

    Returns:
        "mtp" and "dflash" to a file of the folder that is not used, or to a folder beside it whose
        name begins with its own. What is damaged there is left out.
    """
    places = [path for path in sorted(folder.glob("*.safetensors")) if path.name not in used]
    places += sorted(folder.resolve().parent.glob(f"{glob.escape(folder.resolve().name)}?*/"))
    found: dict[str, Path] = {}
    for place in places:
        try:
            kind = _kind_of(place)
        except (CheckpointError, ConfigError):
            continue
        if kind and not isinstance(_builder(config, kind), str):
            found.setdefault(kind, place)
    return found


def _kind_of(place: Path) -> str:
    """Which kind of drafter a file or folder holds, if any."""
    if place.is_file():
        return "mtp" if _is_head(read_slots(place)) else ""
    if _is_bare_head(place):
        return "mtp"
    path = place / "config.json"
    if not path.exists():
        return ""
    if _drafts_blocks(configs.read_json(path)):
        return "dflash"
    return "mtp" if _is_head(_file_names(place)) else ""


def _drafts_blocks(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a block drafter's: it says how long a block is and what masks it."""
    return raw.get("dflash_config") is not None or {"block_size", "mask_token_id"} <= raw.keys()


def _is_bare_head(path: Path) -> bool:
    """Whether a path is a file of weights, or a folder of a head without a config.json."""
    if path.suffix == ".safetensors" and path.is_file():
        return True
    bare = path.is_dir() and not (path / "config.json").exists()
    return bare and any(path.glob("*.safetensors")) and _is_head(_file_names(path))


def _is_head(names: Iterable[str]) -> bool:
    return any(name.endswith(_SIGN) for name in names)


def _file_names(folder: Path) -> list[str]:
    """The tensors of a folder that holds no trunk; none of one that does."""
    names = list(read_checkpoint(folder))
    return [] if any(name.endswith("embed_tokens.weight") for name in names) else names


def own_head(
    config: Mapping[str, Any], model: Any, source: Path, names: Callable[[], Iterable[str]]
) -> nn.Module | str:
    """The module of the prediction head that lies beside a model's weights, or why there is none.

    Args:
        config: the model's, normalised.
        model: as its family built it.
        source: its folder or file.
        names: gives the names of the folder's tensors.
    """
    build = _builder(config, "mtp")
    if isinstance(build, str):
        return build
    module = build(config, model)
    if module is None:
        return "the model's config.json announces no prediction head (mtp_num_hidden_layers)"
    if source.is_file():
        return f"the prediction head of a GGUF file is not read: {source}"
    if not any(f".{_PREFIX}" in f".{name}" for name in names()):
        return (
            "config.json announces a prediction head, but the checkpoint holds no mtp.* tensors, "
            "which converters leave out; give the path of a file of the head"
        )
    return module


def drafter_refusals(
    config: Mapping[str, Any], model: Any, source: Path, names: Callable[[], Iterable[str]]
) -> dict[str, str]:
    """Why a model's own kinds of drafters cannot be had; arguments as for `own_head`.

    Returns:
        "mtp" and "dflash" to the reason; an empty string where there is none.
    """
    head, blocks = own_head(config, model, source, names), _builder(config, "dflash")
    return {
        "mtp": head if isinstance(head, str) else "",
        "dflash": blocks if isinstance(blocks, str) else "",
    }


def _own_module(
    config: Mapping[str, Any], model: Any, source: Path, arrays: Mapping[str, mx.array] | None
) -> FoundModule | str:
    module = own_head(
        config, model, source, lambda: read_checkpoint(source) if arrays is None else arrays
    )
    if isinstance(module, str):
        return module
    path = source / "config.json"
    arrays = load_arrays(read_checkpoint(source)) if arrays is None else arrays
    return _found_head(module, arrays, configs.quantization(config, path), path)


def _head_of(config: Mapping[str, Any], model: Any, path: Path) -> FoundModule:
    """The prediction head of a file or folder that holds nothing else."""
    build = _builder(config, "mtp")
    if isinstance(build, str):
        raise OptionError(f"{path} holds a prediction head, but {build}")
    if not config.get("mtp_num_hidden_layers"):
        config = {**config, "mtp_num_hidden_layers": 1}
    slots = read_slots(path) if path.is_file() else read_checkpoint(path)
    beside = (path.parent if path.is_file() else path) / "config.json"
    quantization: dict[str, Any] | None = None
    if beside.exists():
        raw = configs.normalise(configs.read_json(beside), beside)
        quantization = configs.quantization(raw, beside)
    return _found_head(build(config, model), load_arrays(slots), quantization, beside)


def _found_head(
    module: nn.Module,
    arrays: Mapping[str, mx.array],
    quantization: Mapping[str, Any] | None,
    path: Path,
) -> FoundModule:
    return FoundModule(
        module, arrays, quantization, str(path), lambda head: MTPDrafter(cast("Head", head))
    )


def _block_module(
    config: Mapping[str, Any], model: Any, folder: Path, raw: dict[str, Any]
) -> FoundModule:
    build = _builder(config, "dflash")
    if isinstance(build, str):
        raise OptionError(f"{folder} holds a block drafter, but {build}")
    path = folder / "config.json"
    with configs.naming(path):
        module = build(raw, model)
    return FoundModule(
        module,
        load_arrays(read_checkpoint(folder)),
        configs.quantization(raw, path),
        str(path),
        lambda blocks: DFlashDrafter(cast("Blocks", blocks)),
    )


def _builder(config: Mapping[str, Any], kind: str) -> DrafterBuilder | str:
    """What builds a family's module of a kind, or why nothing does."""
    family = resolve_family(config["model_type"])
    if kind in family.drafters:
        return family.drafters[kind]
    names = {"mtp": "a prediction head", "dflash": "a block drafter"}
    return f"no model of the family {family.name} drafts with {names[kind]}"

"""From what a user asks for to a drafter over a loaded model."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import CheckpointError, ConfigError, OptionError
from turbospark.kernels.device import on_cpu
from turbospark.loading import config as configs
from turbospark.loading.build import LoadedModel, Progress, set_weights
from turbospark.loading.checkpoint import load_arrays, read_checkpoint
from turbospark.loading.install import Handling, install_weights, parameter_slots
from turbospark.loading.opened import open_checkpoint
from turbospark.loading.quantize import Quantization, parse_quantize
from turbospark.loading.quantized import assemble
from turbospark.loading.safetensors import read_slots
from turbospark.loading.source import Source, resolve_source
from turbospark.nn.unit import bind_units
from turbospark.protocols import CausalModel, Drafter, DrafterBuilder
from turbospark.registry import resolve_family
from turbospark.speculation.dflash import Blocks, DFlashDrafter
from turbospark.speculation.model import ModelDrafter
from turbospark.speculation.mtp import Head, MTPDrafter
from turbospark.speculation.ngram import NgramDrafter
from turbospark.speculation.off import NoDrafter
from turbospark.speculation.tokenizers import check_same_tokens

_PREFIX = "mtp."
_SIGN = "pre_fc_norm_hidden.weight"  # a tensor that only prediction heads have
_log = logging.getLogger("turbospark")


def load_drafter(
    draft: str | os.PathLike[str],
    target: LoadedModel,
    *,
    quantize: str | None = None,
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> Drafter:
    """Open a drafter.

    Args:
        draft: "auto" is the checkpoint's own prediction head where it has one, and else none;
            "off" is none; "ngram" looks tokens up in the text; "mtp" is the head, or an error.
            Anything else leads to a checkpoint: of a block drafter (its config.json has a
            `dflash_config`, or a block size and a mask's token), of a prediction head alone, or of
            a draft model.
        target: the model drafted for; its table and head are shared, its kernels run.
        quantize: quantize a drafter's float weights while loading, as for a model.
        local_files_only: never ask the Hub.
        progress: called with bytes done and bytes in all, of a draft model.

    Returns:
        The drafter; one that proposes nothing says why.

    Raises:
        OptionError: the drafter asked for does not exist or does not suit the model.
        SourceError: the path or Hub id leads to no checkpoint.
        ConfigError: its configuration is damaged or not implemented.
        CheckpointError: its weights are damaged, or not those of the configuration.
    """
    if draft == "off":
        return NoDrafter()
    if draft == "ngram":
        return NgramDrafter()
    wish = parse_quantize(quantize)
    if draft == "auto":
        return _automatic(target, wish)
    if draft == "mtp":
        head = _own_drafter(target, wish)
        if isinstance(head, str):
            raise OptionError(f"draft='mtp' cannot be had: {head}; use 'auto', 'ngram' or 'off'")
        return head
    if draft == "dflash":
        raise OptionError(
            "draft='dflash' does not say which: give the path or Hub id of the block drafter's "
            "checkpoint"
        )
    if _is_bare_head(Path(draft)):
        return _head_of(target, Path(draft), wish)
    source = resolve_source(draft, local_files_only=local_files_only)
    return _from_checkpoint(source, target, wish, progress)


def _automatic(target: LoadedModel, wish: Quantization | None) -> Drafter:
    try:
        head = _own_drafter(target, wish)
    except (CheckpointError, ConfigError) as error:
        head = str(error)
    return NoDrafter(head) if isinstance(head, str) else head


def _from_checkpoint(
    source: Source, target: LoadedModel, wish: Quantization | None, progress: Progress | None
) -> Drafter:
    if source.kind == "safetensors":
        raw = configs.read_json(source.path / "config.json")
        if _drafts_blocks(raw):
            return _block_drafter(target, source.path, raw, wish)
        if _is_head(_file_names(source.path)):
            return _head_of(target, source.path, wish)
    opened = open_checkpoint(source)
    check_same_tokens(target.tokenizer, opened.tokenizer)
    model = cast("CausalModel", opened.model)
    if model.vocab_size < target.tokenizer.vocab_size:
        raise OptionError(
            f"the draft model {source.path} has {model.vocab_size} rows for the "
            f"{target.tokenizer.vocab_size} tokens of its tokenizer: its files are not of one model"
        )
    set_weights(opened, Handling(on_cpu(), None if opened.is_quantized else wish), progress)
    bind_units(opened.model, target.kernels)
    return ModelDrafter(model, target.model.vocab_size)


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


def _own_drafter(target: LoadedModel, wish: Quantization | None) -> MTPDrafter | str:
    source = target.source
    module = own_head(target.config, target.model, source, lambda: read_checkpoint(source))
    if isinstance(module, str):
        return module
    path = source / "config.json"
    quantization = configs.quantization(target.config, path)
    arrays = load_arrays(read_checkpoint(source))
    _install(module, arrays, quantization, str(path), target, wish)
    return MTPDrafter(cast("Head", module))


def _head_of(target: LoadedModel, path: Path, wish: Quantization | None) -> MTPDrafter:
    """The prediction head of a file or folder that holds nothing else."""
    build = _builder(target.config, "mtp")
    if isinstance(build, str):
        raise OptionError(f"{path} holds a prediction head, but {build}")
    config = target.config
    if not config.get("mtp_num_hidden_layers"):
        config = config | {"mtp_num_hidden_layers": 1}
    slots = read_slots(path) if path.is_file() else read_checkpoint(path)
    beside = (path.parent if path.is_file() else path) / "config.json"
    quantization: dict[str, Any] | None = None
    if beside.exists():
        raw = configs.normalise(configs.read_json(beside), beside)
        quantization = configs.quantization(raw, beside)
    module = build(config, target.model)
    _install(module, load_arrays(slots), quantization, str(beside), target, wish)
    return MTPDrafter(cast("Head", module))


def _block_drafter(
    target: LoadedModel, folder: Path, raw: dict[str, Any], wish: Quantization | None
) -> DFlashDrafter:
    build = _builder(target.config, "dflash")
    if isinstance(build, str):
        raise OptionError(f"{folder} holds a block drafter, but {build}")
    path = folder / "config.json"
    with configs.naming(path):
        module = build(raw, target.model)
    arrays = load_arrays(read_checkpoint(folder))
    _install(module, arrays, configs.quantization(raw, path), str(path), target, wish)
    return DFlashDrafter(cast("Blocks", module))


def _builder(config: Mapping[str, Any], kind: str) -> DrafterBuilder | str:
    """What builds a family's module of a kind, or why nothing does."""
    family = resolve_family(config["model_type"])
    if kind in family.drafters:
        return family.drafters[kind]
    names = {"mtp": "a prediction head", "dflash": "a block drafter"}
    return f"no model of the family {family.name} drafts with {names[kind]}"


def _install(
    module: nn.Module,
    arrays: Mapping[str, mx.array],
    quantization: Mapping[str, Any] | None,
    where: str,
    target: LoadedModel,
    wish: Quantization | None,
) -> None:
    """Set and bind a drafter module's weights; those of a trunk beside them are not read."""
    widths = {
        name.removesuffix(".weight"): slot.shape[-1]
        for name, slot in parameter_slots(module).items()
        if slot.is_matrix
    }

    def width_of(path: str) -> int | None:
        tail = f".{path}".rpartition(f".{_PREFIX}")[2]
        return widths.get(tail.removeprefix("."))

    weights = assemble(arrays, quantization, width_of, where)
    found = cast("Any", module).sanitize(weights)
    install_weights(module, found, f"the drafter of {where}", Handling(on_cpu(), wish))
    bind_units(module, target.kernels)
    storage = getattr(module, "norms", None)
    if storage is not None:
        _log.info("the prediction head's norms hold %s: %s", storage.holds, storage.reason)

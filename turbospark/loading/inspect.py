"""What a checkpoint holds, read from its headers only."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from turbospark.errors import CheckpointError, ConfigError
from turbospark.loading import config as configs
from turbospark.loading.checkpoint import has_no_weights
from turbospark.loading.drafter_modules import drafter_refusals, drafters_beside
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_blocks import LAYOUTS
from turbospark.loading.gguf_weights import architecture, gguf_config
from turbospark.loading.inspection import Inspection, TensorRow
from turbospark.loading.install import check_fit, parameter_slots
from turbospark.loading.opened import build_model, folder_family, gguf_family
from turbospark.loading.outline import outline
from turbospark.loading.quantized import canonical, matrix_path
from turbospark.loading.safetensors import Slot
from turbospark.loading.source import Source, resolve_headers
from turbospark.loading.structure import SHORT_TYPES, structure
from turbospark.protocols import CausalModel
from turbospark.registry import GGUF_GROUP, GROUP, known_types

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def inspect(
    path_or_repo: str | os.PathLike[str],
    *,
    context: int | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Inspection:
    """Read what a checkpoint holds; its family need not be implemented.

    Args:
        path_or_repo: as for `load`; a folder may have a config.json and no weights. The weights of
            a Hub id stay on the Hub.
        context: tokens of a session, for the bytes of its caches; by default the trained length.
        revision: branch, tag or commit on the Hub.
        local_files_only: never ask the Hub.

    Raises:
        SourceError: no checkpoint is there.
        ConfigError: its configuration is damaged.
        CheckpointError: its headers are damaged.
    """
    source = resolve_headers(path_or_repo, revision=revision, local_files_only=local_files_only)
    if source.kind == "gguf":
        return _inspect_gguf(source, context)
    return _inspect_folder(source, context)


def _inspect_gguf(source: Source, context: int | None) -> Inspection:
    file = GGUFFile(source.path)
    name = architecture(file)
    rows = tuple(
        TensorRow(item.name, item.shape, item.type.name, item.nbytes, source.path.name)
        for item in file.tensors.values()
    )
    return Inspection(
        path=str(source.path),
        kind=f"gguf version {file.version}" if file.version != 3 else "gguf",
        model_type=name,
        implemented=name in known_types(GGUF_GROUP),
        config={key: _shortened(value) for key, value in file.metadata.items()},
        quantization=_count(_gguf_layout(row.type) for row in rows if len(row.shape) > 1),
        tokenizer=_gguf_tokenizer(file),
        tensors=rows,
        **_built(source, context, {}),
    )


def _inspect_folder(source: Source, context: int | None) -> Inspection:
    folder = source.path
    path = folder / "config.json"
    raw = configs.read_json(path)
    name = configs.model_type(raw, path)
    config = configs.normalise(raw, path)
    is_bare = source.remote is None and has_no_weights(folder)
    slots = {} if is_bare else source.slots()
    rows = tuple(
        TensorRow(name, slot.shape, SHORT_TYPES[slot.dtype], slot.nbytes, slot.file.name)
        for name, slot in slots.items()
    )
    built = _built(source, context, slots)
    tokenizer = _folder_tokenizer(folder)
    if tokenizer == "none":
        built.setdefault("refused", f"there is no {' and no '.join(_TOKENIZER_FILES)}")
    return Inspection(
        path=source.name,
        kind="safetensors",
        model_type=name,
        implemented=name in known_types(GROUP),
        config=config,
        quantization=_count(_folder_layouts(slots, config)),
        tokenizer=tokenizer,
        tensors=rows,
        **built,
    )


def _built(source: Source, context: int | None, slots: Mapping[str, Slot]) -> dict[str, Any]:
    """What the family says of the model, and what keeps its weights from being loaded."""
    found: dict[str, Any] = {}
    try:
        model, config = _without_weights(source)
        found["model"] = model
        found["drafter_refusals"] = drafter_refusals(config, model, source.path, lambda: slots)
        found["structure"] = structure(model, config, None, context)
        if source.kind == "safetensors":
            used = {slot.file.name for slot in slots.values()}
            beside = {} if source.remote else drafters_beside(config, source.path, used)
            found["drafters_beside"] = {kind: str(place) for kind, place in beside.items()}
        if source.kind == "safetensors" and not slots:
            return found | {"refused": "there are no weights"}
        shape = outline(source, dequantize=True)
        check_fit(parameter_slots(shape.model), shape.weights, shape.path)
        found["structure"] = structure(model, config, shape.weights, context)
    except (ConfigError, CheckpointError) as error:
        found["refused"] = str(error)
    return found


def _without_weights(source: Source) -> tuple[CausalModel, dict[str, Any]]:
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        family, mapping = gguf_family(file)
        config = gguf_config(file, mapping)
        return cast("CausalModel", build_model(family, config, source.path)), config
    path = source.path / "config.json"
    raw = configs.read_config(source.path)
    config = configs.normalise(raw, path)
    return cast("CausalModel", build_model(folder_family(raw, path), config, path)), config


def _shortened(value: Any) -> Any:
    # Lists of a vocabulary's length help nobody here.
    length = _length(value)
    return value if length <= 64 else f"{length} values"


def _length(value: Any) -> int:
    return len(cast("list[Any]", value)) if isinstance(value, list) else 0


def _gguf_layout(kind: str) -> str:
    layout = LAYOUTS.get(kind)
    if layout is None:
        return kind
    return f"{kind} ({layout.bits} bits, groups of {layout.group_size})"


def _gguf_tokenizer(file: GGUFFile) -> str:
    kind = file.metadata.get("tokenizer.ggml.model")
    count = _length(file.metadata.get("tokenizer.ggml.tokens"))
    return f"in the file: {kind}, {count} tokens" if isinstance(kind, str) and count else "none"


def _folder_layouts(slots: dict[str, Slot], config: dict[str, Any]) -> Iterable[str]:
    given: Any = config.get("quantization") or config.get("quantization_config")
    said = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    own: dict[str, Any] = {canonical(path): value for path, value in said.items()}
    for name, slot in slots.items():
        if name.endswith("_blocks"):
            yield "mxfp4"
        if not name.endswith(".weight") or len(slot.shape) < 2:
            continue
        path = name.removesuffix(".weight")
        scales = slots.get(f"{path}.scales")
        if scales is None:
            yield SHORT_TYPES[slot.dtype]
        elif SHORT_TYPES[scales.dtype] == "U8":
            yield "mxfp4"
        else:
            product = 32 * slot.shape[-1] // max(1, scales.shape[-1])
            entry = own.get(canonical(path), own.get(matrix_path(path)))
            values = cast("dict[str, Any]", entry if isinstance(entry, dict) else said)
            size = values.get("group_size")
            if not isinstance(size, int) or not size or product % size:
                size = 64
            yield f"{product // size} bits, groups of {size}"


def _folder_tokenizer(folder: Path) -> str:
    found = [name for name in _TOKENIZER_FILES if (folder / name).exists()]
    return ", ".join(found) or "none"


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())

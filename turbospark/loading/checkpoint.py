"""The weight files of a checkpoint folder: which ones count, and that all of them are there."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from turbospark.errors import CheckpointError, ConfigError
from turbospark.loading.config import read_json
from turbospark.loading.safetensors import Slot, load_file, read_slots

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{5,})-of-(?P<total>\d{5,})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".npz")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a checkpoint, wherever they are.

    Attributes:
        place: what they lie in, for messages and to name each by.
        names: every file that is there.
        read: gives the tensors of some of them, in their order; only headers are read.
    """

    place: Path
    names: Collection[str]
    read: Callable[[Sequence[Path]], Sequence[dict[str, Slot]]]


def read_checkpoint(folder: Path, files: WeightFiles | None = None) -> dict[str, Slot]:
    """Every tensor of a checkpoint and where it lies; only headers are read.

    Args:
        folder: holds the index where there is one.
        files: the weight files where they are not in the folder.

    Raises:
        CheckpointError: a file is missing, damaged, cut short, or holds other tensors than the
            index says; the message names the file.
    """
    files = files or _files_of(folder)
    index = folder / INDEX
    if index.exists():
        return _read_indexed(files, index)
    return _merge(files, _unindexed_files(files))


def _files_of(folder: Path) -> WeightFiles:
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return WeightFiles(folder, names, lambda paths: [read_slots(path) for path in paths])


@contextmanager
def naming_files(where: str, config: str) -> Generator[None]:
    """Add the files to a CheckpointError of the code below, which knows the tensors only.

    Args:
        where: the tensors' files.
        config: the file whose errors name it themselves.
    """
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(config):
            raise
        raise CheckpointError(f"{where}: {error}") from error


def where_of(folder: Path, slots: Mapping[str, Slot]) -> str:
    """The files of tensors, for messages.

    Args:
        folder: holds the index where there is one.
        slots: what is read.
    """
    files = sorted({slot.file for slot in slots.values()})
    if len(files) == 1:
        return str(files[0])
    listed = f" of {INDEX}" if (folder / INDEX).exists() else ""
    place = files[0].parent if files else folder
    return f"{place} ({len(files)} files{listed})"


def has_no_weights(folder: Path) -> bool:
    """Whether a folder holds nothing that weights could be read from, nor an index of them."""
    return not (folder / INDEX).exists() and not any(folder.glob("*.safetensors"))


def load_arrays(slots: Mapping[str, Slot]) -> dict[str, mx.array]:
    """The tensors of a checked folder, lazily: each is read when it is first evaluated."""
    by_file: dict[Path, dict[str, Slot]] = {}
    for name, slot in slots.items():
        by_file.setdefault(slot.file, {})[name] = slot
    arrays: dict[str, mx.array] = {}
    for path, part in by_file.items():
        arrays.update(load_file(path, part))
    return arrays


def _read_indexed(files: WeightFiles, index: Path) -> dict[str, Slot]:
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    _require_shards(files, names, INDEX)
    slots = _merge(files, [files.place / name for name in names])
    lost = [name for name in weight_map if name not in slots]
    if lost:
        raise CheckpointError(
            f"{index} lists {some(lost)} ({len(lost)} tensors) that {weight_map[lost[0]]} should "
            "hold, but no shard does; index and shards belong to different checkpoints"
        )
    extra = [name for name in slots if name not in weight_map]
    if extra:
        raise CheckpointError(
            f"{slots[extra[0]].file} holds {some(extra)} ({len(extra)} tensors) that {INDEX} does "
            "not list; index and shards belong to different checkpoints"
        )
    moved = [name for name, file in weight_map.items() if slots[name].file.name != file]
    if moved:
        raise CheckpointError(
            f"{index} says that {moved[0]!r} is in {weight_map[moved[0]]}, but it is in "
            f"{slots[moved[0]].file.name}; index and shards belong to different checkpoints"
        )
    return slots


def _weight_map(index: Path) -> dict[str, str]:
    try:
        value: Any = read_json(index).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{index} has no weight_map that says which shard holds which tensor")
    weight_map = cast("dict[str, Any]", value)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file:
            raise CheckpointError(
                f"{index}: the shard of {name!r} is {file!r}, not a safetensors file of the folder"
            )
    return weight_map


def _require_shards(files: WeightFiles, names: Sequence[str], source: str) -> None:
    missing = sorted(set(names) - set(files.names))
    if missing:
        raise CheckpointError(
            f"{len(names) - len(missing)} of {len(names)} weight files that {source} names are in "
            f"{files.place}; missing: {some(missing, 4)}. Resume the download, for example with "
            f"`hf download OWNER/NAME --local-dir {files.place}`"
        )


def _unindexed_files(files: WeightFiles) -> list[Path]:
    folder = files.place
    found = sorted(folder / name for name in files.names if name.endswith(".safetensors"))
    if folder / SINGLE in found:
        return [folder / SINGLE]
    shards = [match for path in found if (match := _SHARD.fullmatch(path.name))]
    if shards:
        first = shards[0]
        total = int(first["total"])
        if total > 100_000:
            raise CheckpointError(f"{folder / first.string} names {total} shards: not plausible")
        names = [
            f"{first['stem']}-{part:0{len(first['part'])}d}-of-{first['total']}.safetensors"
            for part in range(1, total + 1)
        ]
        _require_shards(files, names, f"the name {first.string}")
        return [folder / name for name in names]
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{folder} has {len(found)} safetensors files ({some([p.name for p in found])}) and "
            f"neither {INDEX} nor {SINGLE}, so which of them count is unknown"
        )
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {path.readlink()}, which is not there: repeat the download"
            )
    pickles = [name for name in sorted(files.names) if name.endswith(_PICKLES)]
    hint = (
        f"; {some(pickles)} is not read: pickled weights may run code, use a safetensors release"
        if pickles
        else ""
    )
    raise CheckpointError(f"{folder} has a config.json but no safetensors weights{hint}")


def _merge(files: WeightFiles, paths: Sequence[Path]) -> dict[str, Slot]:
    parts = list(zip(paths, files.read(paths), strict=True))
    counts = Counter(name for _, slots in parts for name in slots)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        holding = [path.name for path, slots in parts if twice[0] in slots]
        raise CheckpointError(f"tensor {twice[0]!r} is in {' and '.join(holding)} of {files.place}")
    return {name: slot for _, slots in parts for name, slot in slots.items()}


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more

"""Tables of a checkpoint that are too large for memory and stay in its files."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from turbospark.errors import CheckpointError, ShapeError
from turbospark.kernels.weights import BITS
from turbospark.loading.quantized import canonical
from turbospark.loading.row_files import RowFiles, TablePart
from turbospark.loading.safetensors import Slot
from turbospark.nn.ngram_table import NgramTable, RowReader

RESIDENT_BYTES = 1 << 30
"""A table of at most so many bytes in its files is read into memory."""

_PART = re.compile(r"(?:\.(?:shard_|shards\.)(?P<part>\d+))?\.(?P<kind>weight|scales|biases)")
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def large_tables(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The tables of a model that stay in the files.

    Args:
        model: with unset weights.
        sizes: checkpoint names to bytes.

    Returns:
        The path of each table's module to the checkpoint's names of its parts.
    """
    found: dict[str, list[str]] = {}
    for path in _tables(model):
        names = list(_names_of(path, sizes))
        if sum(sizes[name] for name in names) > RESIDENT_BYTES:
            found[path] = names
    return found


def leave_tables(
    model: nn.Module,
    slots: Mapping[str, Slot],
    open_table: Callable[[Sequence[TablePart]], RowReader] = RowFiles,
) -> dict[str, Slot]:
    """Leave large tables in their files and give the model readers of their rows.

    Args:
        model: with unset weights.
        slots: every tensor of the checkpoint.
        open_table: makes a reader of a table's parts.

    Returns:
        The tensors that are to be read: all others.

    Raises:
        CheckpointError: parts of a table are missing or there twice, or are not those of the
            model.
    """
    modules, rest = _tables(model), dict(slots)
    for path in modules:
        _numbered(path, {name: slots[name] for name in _names_of(path, slots)})
    sizes = {name: slot.nbytes for name, slot in slots.items()}
    for path, names in large_tables(model, sizes).items():
        own = {name: rest.pop(name) for name in names}
        parts = _parts(path, own, modules[path].shape[1])
        _attach(modules[path], open_table(parts), own)
    return rest


class UnreadTable:
    """A table of which only the size matters; its files need not be there."""

    def __init__(self, parts: Sequence[TablePart]) -> None:
        self.shape = sum(part.rows for part in parts), parts[0].width

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def read(self, rows: NDArray[np.int64]) -> mx.array:
        raise NotImplementedError


def _tables(model: nn.Module) -> dict[str, NgramTable]:
    modules = cast("list[tuple[str, nn.Module]]", model.named_modules())
    return {path: module for path, module in modules if isinstance(module, NgramTable)}


def _names_of(path: str, names: Iterable[str]) -> Iterable[str]:
    prefix = canonical(path)
    for name in names:
        own = canonical(name)
        if own.startswith(prefix) and _PART.fullmatch(own, len(prefix)):
            yield name


def _parts(path: str, slots: Mapping[str, Slot], width: int) -> list[TablePart]:
    """The parts of a table in their order."""
    grouped = _numbered(path, slots)
    parts = [_part(path, grouped[index], width) for index in range(len(grouped))]
    if len({_layout(part) for part in parts}) > 1:
        raise CheckpointError(f"the parts of the table {path} differ in width or layout")
    return parts


def _numbered(path: str, slots: Mapping[str, Slot]) -> dict[int, dict[str, Slot]]:
    """The arrays of each part of a table."""
    grouped: dict[int, dict[str, Slot]] = {}
    for name, slot in slots.items():
        match = _PART.search(name)
        assert match is not None
        index, kind = int(match["part"] or 0), match["kind"]
        arrays = grouped.setdefault(index, {})
        if kind in arrays:
            raise CheckpointError(
                f"{slot.file}: {name!r} is part {index} of the table {path}, which "
                f"{arrays[kind].file} holds under another name"
            )
        arrays[kind] = slot
    missing = sorted(set(range(max(grouped, default=0) + 1)) - grouped.keys())
    if missing and grouped:
        files = sorted({str(slot.file) for slot in slots.values()})
        raise CheckpointError(
            f"part {missing[0]} of the table {path} is missing: {files[0]}"
            + (f" and {len(files) - 1} more files hold" if len(files) > 1 else " holds")
            + f" {len(grouped)} parts"
        )
    return grouped


def _part(path: str, arrays: dict[str, Slot], width: int) -> TablePart:
    file = next(iter(arrays.values())).file
    faults = f"{file}: the table {path}"
    if set(arrays) not in ({"weight"}, {"weight", "scales", "biases"}):
        raise CheckpointError(f"{faults} has {sorted(arrays)}: parts of it are missing")
    if any(len(slot.shape) != 2 or not slot.shape[0] for slot in arrays.values()):
        raise CheckpointError(f"{faults} is no matrix")
    weight = arrays["weight"]
    if len(arrays) == 1:
        if weight.dtype not in _FLOATS:
            raise CheckpointError(f"{faults} holds {weight.dtype}, not floats")
        return TablePart(arrays)
    scales = arrays["scales"].shape
    bits, group_size = 32 * weight.shape[1] // width, width // max(1, scales[1])
    fits = (
        bits in BITS
        and 32 * weight.shape[1] == width * bits
        and group_size * scales[1] == width
        and scales == arrays["biases"].shape
        and scales[0] == weight.shape[0]
        and weight.dtype == mx.uint32
    )
    if not fits:
        raise CheckpointError(
            f"{faults}: codes {weight.shape} and scales {scales} are no rows of {width} numbers"
        )
    for kind in ("scales", "biases"):
        if arrays[kind].dtype not in _FLOATS:
            raise CheckpointError(f"{faults} has {kind} of {arrays[kind].dtype}, not floats")
    return TablePart(arrays, bits, group_size)


def _layout(part: TablePart) -> tuple[Any, ...]:
    arrays = (part.arrays[name] for name in sorted(part.arrays))
    return part.bits, part.group_size, *((slot.dtype, slot.shape[1:]) for slot in arrays)


def _attach(table: NgramTable, reader: RowReader, slots: Mapping[str, Slot]) -> None:
    try:
        table.leave_in_files(reader)
    except ShapeError as error:
        name, slot = next(iter(slots.items()))
        raise CheckpointError(f"{slot.file}: {name!r} and its like: {error}") from error

"""Safetensors headers: every length, shape and offset is checked before a weight is read."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from turbospark.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "BOOL": mx.bool_,
    "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16,
    "U32": mx.uint32, "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies.

    Attributes:
        file: the safetensors file.
        dtype: its MLX type.
        shape: its dimensions.
        offset: of its first byte in the file.
        nbytes: its bytes.
    """

    file: Path
    dtype: mx.Dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_slots(path: Path) -> dict[str, Slot]:
    """Read and check the header of one file.

    Raises:
        CheckpointError: the file is empty, cut short, too long, or its header contradicts itself.
    """
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes): its download did not happen; repeat it")
    raw, start = _header_bytes(path, size)
    entries = _parse(path, raw)
    entries.pop("__metadata__", None)
    slots = {name: read_slot(path, name, entry, start) for name, entry in entries.items()}
    _check_layout(path, slots, start, size)
    return slots


def _header_bytes(path: Path, size: int) -> tuple[bytes, int]:
    with path.open("rb") as file:
        first = file.read(8)
        if first == b"version ":
            raise CheckpointError(
                f"{path} is a Git LFS pointer of {size} bytes, not the weights: run `git lfs pull`"
            )
        length = int.from_bytes(first, "little")
        if len(first) < 8 or 8 + length > size:
            raise CheckpointError(
                f"{path} is short: its header needs {8 + length if len(first) == 8 else 8} bytes "
                f"and the file has {size}; it is damaged or its download did not finish"
            )
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} announces a header of {length} bytes; it is damaged")
        return file.read(length), 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands there twice")
    return result


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(raw.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a damaged header: it is no JSON object")
    return cast("dict[str, Any]", entries)


def _counts(value: Any) -> list[int] | None:
    """A list of non-negative whole numbers, or None."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    return items if all(type(item) is int and item >= 0 for item in items) else None


def read_slot(path: Path, name: str, entry: Any, start: int) -> Slot:
    """A tensor by what a header says of it.

    Args:
        path: the file.
        name: the tensor's.
        entry: the header's value, a mapping of dtype, shape and data_offsets.
        start: where the header's offsets count from.

    Raises:
        CheckpointError: it contradicts itself, or has a type that is not implemented.
    """
    fields = cast("dict[str, Any]", entry if isinstance(entry, dict) else {})
    shape, span = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or span is None or len(span) != 2 or span[0] > span[1] or len(shape) > 32:
        raise CheckpointError(f"{path}: the header of tensor {name!r} is damaged: {entry!r:.200}")
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has type {dtype!r}, which is not implemented; "
            f"known: {', '.join(DTYPES)}"
        )
    nbytes = math.prod(shape) * DTYPES[dtype].size
    if nbytes != span[1] - span[0]:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} and type {dtype} takes {nbytes} bytes, but "
            f"its offsets {span} span {span[1] - span[0]}; the header is damaged"
        )
    return Slot(path, DTYPES[dtype], tuple(shape), start + span[0], nbytes)


def _check_layout(path: Path, slots: dict[str, Slot], start: int, size: int) -> None:
    """Tensors follow one another without overlap or hole, and end where the file ends."""
    end = start
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if slot.offset != end:
            fault = "overlaps the tensor before it" if slot.offset < end else "leaves a hole"
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {slot.offset} where {end} is next: it "
                f"{fault}; the header is damaged"
            )
        end += slot.nbytes
    if end > size:
        whole = sum(slot.offset + slot.nbytes <= size for slot in slots.values())
        raise CheckpointError(
            f"{path} is short: it has {size} bytes of {end}, {whole} of {len(slots)} tensors are "
            "whole; the file is cut or its download did not finish: resume or repeat the download"
        )
    if end < size:
        raise CheckpointError(f"{path} has {size - end} bytes after its last tensor; it is damaged")


def load_file(path: Path, slots: dict[str, Slot]) -> dict[str, mx.array]:
    """The tensors of one checked file, each read by its offset when it is first evaluated.

    Raises:
        CheckpointError: MLX cannot read the file, or finds other tensors than the header check.
    """
    try:
        arrays = cast("dict[str, mx.array]", mx.load(os.fspath(path), format="safetensors"))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for name, slot in slots.items():
        array = arrays.get(name)
        if array is None or array.shape != slot.shape or array.dtype != slot.dtype:
            raise CheckpointError(f"{path}: tensor {name!r} reads otherwise than announced")
    return {name: arrays[name] for name in slots}

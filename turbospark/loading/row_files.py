"""Rows of a table that stays in its files: each is read by its offset when it is asked for."""

import fcntl
import os
import struct
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from turbospark.errors import CheckpointError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.arrays import Array, fresh
from turbospark.loading.safetensors import Slot

Numbers = NDArray[np.int64]

_READ_ADVICE = 44  # F_RDADVISE of macOS, which Python does not name


@dataclass(frozen=True, slots=True)
class TablePart:
    """Some consecutive rows of a table.

    Attributes:
        arrays: "weight" for floats; also "scales" and "biases" where weight holds codes.
        bits: of a code; 0 for floats.
        group_size: numbers of a row that share a scale; 0 for floats.
    """

    arrays: dict[str, Slot]
    bits: int = 0
    group_size: int = 0

    @property
    def rows(self) -> int:
        """How many."""
        return self.arrays["weight"].shape[0]

    @property
    def width(self) -> int:
        """Numbers of a row."""
        if not self.bits:
            return self.arrays["weight"].shape[1]
        return self.arrays["scales"].shape[1] * self.group_size


class RowFiles:
    """A table [rows, dims] in safetensors files, in parts one below another.

    Nothing of it is kept in memory but what the system's own file cache keeps. Reads may come
    from any thread.

    Args:
        parts: alike in all but their rows.

    Raises:
        CheckpointError: a file cannot be opened.
    """

    def __init__(self, parts: Sequence[TablePart]) -> None:
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *(part.rows for part in parts)])
        self._files: dict[Path, int] = {}
        for path in dict.fromkeys(slot.file for part in parts for slot in part.arrays.values()):
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, _close, list(self._files.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and numbers of a row."""
        return int(self._starts[-1]), self._parts[0].width

    def prefetch(self, rows: Numbers) -> None:
        """Have the system fetch rows side by side before they are read one after another."""
        for part, row in self._places(np.unique(rows)):
            for slot in part.arrays.values():
                step = slot.nbytes // slot.shape[0]
                _announce(self._files[slot.file], slot.offset + row * step, step)

    def read(self, rows: Numbers) -> mx.array:
        """Rows by their numbers [n]: [n, dims] in the files' float type, float32 from codes.

        Raises:
            CheckpointError: a file has become shorter than it was.
        """
        wanted, inverse = np.unique(rows, return_inverse=True)
        first = self._parts[0]
        read = {name: _Rows.of(slot, len(wanted)) for name, slot in first.arrays.items()}
        for place, (part, row) in enumerate(self._places(wanted)):
            for name, slot in part.arrays.items():
                self._read_row(slot, row, read[name].bytes[place])
        arrays = {name: made.filled()[mx.array(inverse)] for name, made in read.items()}
        if not first.bits:
            return arrays["weight"]
        parts = (arrays["weight"], arrays["scales"], arrays["biases"])
        return dequantize_reference(QuantizedWeight(*parts, first.bits, first.group_size))

    def _places(self, numbers: Numbers) -> Iterator[tuple[TablePart, int]]:
        """The part of each row, and its number there."""
        indices = np.searchsorted(self._starts, numbers, side="right") - 1
        rows = numbers - self._starts[indices]
        for index, row in zip(indices.tolist(), rows.tolist(), strict=True):
            yield self._parts[index], row

    def _read_row(self, slot: Slot, row: int, target: Array) -> None:
        size = slot.nbytes // slot.shape[0]
        count = os.preadv(self._files[slot.file], [target.data], slot.offset + row * size)
        if count != size:
            raise CheckpointError(
                f"{slot.file} gave {count} bytes of a row of {size}: it was cut after it was loaded"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Memory for rows of one array, as MLX and as bytes [n, row bytes]."""

    array: mx.array
    bytes: Array
    is_bfloat: bool

    @staticmethod
    def of(slot: Slot, count: int) -> "_Rows":
        is_bfloat = slot.dtype == mx.bfloat16
        array, view = fresh((count, *slot.shape[1:]), mx.uint16 if is_bfloat else slot.dtype)
        return _Rows(array, view.view(np.uint8).reshape(count, -1), is_bfloat)

    def filled(self) -> mx.array:
        """The rows, once their bytes are there."""
        return self.array.view(mx.bfloat16) if self.is_bfloat else self.array


def _announce(descriptor: int, offset: int, count: int) -> None:
    """Say that bytes of a file will be read; where the system knows no such thing, do nothing."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)
    elif sys.platform == "darwin":
        fcntl.fcntl(descriptor, _READ_ADVICE, struct.pack("@qi4x", offset, count))


def _close(descriptors: list[Any]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

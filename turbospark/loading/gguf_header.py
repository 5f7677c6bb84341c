"""The header of a GGUF file: metadata and the table of tensors, every count and offset checked.

Format: docs/gguf.md of ggml, versions 2 and 3. Nothing is allocated from a count that the file's
own size does not allow.
"""

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from turbospark.errors import CheckpointError, UnsupportedError
from turbospark.loading.gguf_types import TYPES, TensorType

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_ARRAY = 1 << 23
MAX_NAME = 1 << 16
MAX_TEXT = 1 << 26
MAX_DEPTH = 3
WINDOW = 1 << 22

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table.

    Attributes:
        name: as in the file.
        shape: numpy order, the input dimension last.
        type: its ggml type.
        offset: of its first byte in the file.
        nbytes: its bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the weights."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads forward through a file, a window of it at a time."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0
        self._window, self._start = b"", 0

    @property
    def left(self) -> int:
        return self.size - self.position

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path} at byte {self.position}: {message}")

    def view(self, length: int) -> tuple[bytes, int]:
        """A buffer and where in it the next bytes start; at least `length` of them."""
        if length > self.left:
            raise self.fail(
                f"{length} more bytes are announced but only {self.left} follow; the file is cut "
                "short or damaged: download it again"
            )
        at = self.position - self._start
        if at + length > len(self._window):
            self.file.seek(self.position)
            self._window = self.file.read(max(length, min(WINDOW, self.left)))
            self._start, at = self.position, 0
            if len(self._window) < length:
                raise self.fail("the file became shorter while it was read")
        return self._window, at

    def take(self, length: int) -> bytes:
        window, at = self.view(length)
        self.position += length
        return window[at : at + length]

    def number(self, kind: str) -> int:
        layout = struct.Struct(kind)
        return layout.unpack(self.take(layout.size))[0]

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """A 64-bit count of things that take at least `least_bytes` each."""
        count = self.number("<Q")
        if count > limit or count * least_bytes > self.left:
            raise self.fail(
                f"{count} {what} are announced, more than {min(limit, self.left // least_bytes)} "
                "can be there; the file is damaged"
            )
        return count

    def text(self, what: str, limit: int) -> str:
        length = self.number("<Q")
        if length > limit:
            raise self.fail(f"{what} of {length} bytes, more than {limit}; the file is damaged")
        return self.decode(self.take(length), what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8; the file is damaged") from None


def read_header(path: Path) -> Header:
    """Read and check everything before the weights.

    Raises:
        CheckpointError: the file is no GGUF file, or is damaged or cut short.
        UnsupportedError: it is of a version or byte order that is not implemented.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file, path)
        version = _read_version(cursor)
        num_tensors = cursor.count("tensors", MAX_TENSORS, 24)
        num_keys = cursor.count("metadata keys", MAX_KEYS, 13)
        metadata = _read_metadata(cursor, num_keys)
        alignment = _alignment(cursor, metadata)
        rows = [_read_row(cursor) for _ in range(num_tensors)]
        base = cursor.position + -cursor.position % alignment
        tensors = _place(cursor, rows, base, alignment)
    return Header(version, metadata, tensors)


def _read_version(cursor: _Cursor) -> int:
    if cursor.size == 0:
        raise CheckpointError(f"{cursor.path} is empty (0 bytes): download it again")
    magic = cursor.take(min(4, cursor.size))
    if magic != b"GGUF":
        raise CheckpointError(
            f"{cursor.path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'"
        )
    version = cursor.number("<I")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{cursor.path} is a big-endian GGUF file, which is not implemented; convert it with "
            "gguf-py's gguf_convert_endian.py, or use a little-endian file"
        )
    if version not in {2, 3}:
        raise UnsupportedError(
            f"{cursor.path} is GGUF version {version}; versions 2 and 3 are implemented"
        )
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", MAX_NAME)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} stands there twice; the file is damaged")
        metadata[key] = _read_value(cursor, cursor.number("<I"), key, 0)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    if kind == _STRING:
        return cursor.text(f"the value of {key!r}", MAX_TEXT)
    if kind == _ARRAY:
        return _read_array(cursor, key, depth)
    return _read_numbers(cursor, kind, 1, key)[0]


def _read_numbers(cursor: _Cursor, kind: int, count: int, key: str) -> list[Any]:
    if kind not in _SCALARS:
        raise cursor.fail(f"{key!r} has value type {kind}, which does not exist")
    layout = np.dtype(_SCALARS[kind])
    raw = cursor.take(count * layout.itemsize)
    if kind == _BOOL and raw.translate(None, b"\x00\x01"):
        raise cursor.fail(f"{key!r} holds a truth value that is neither 0 nor 1")
    return np.frombuffer(raw, layout).tolist()


def _read_array(cursor: _Cursor, key: str, depth: int) -> list[Any]:
    if depth >= MAX_DEPTH:
        raise cursor.fail(f"{key!r} nests arrays more than {MAX_DEPTH} deep")
    kind = cursor.number("<I")
    if kind == _STRING:
        return _read_strings(cursor, cursor.count(f"strings of {key!r}", MAX_ARRAY, 8), key)
    if kind == _ARRAY:
        count = cursor.count(f"arrays of {key!r}", MAX_NAME, 12)
        return [_read_array(cursor, key, depth + 1) for _ in range(count)]
    if kind not in _SCALARS:
        raise cursor.fail(f"{key!r} is an array of value type {kind}, which does not exist")
    size = np.dtype(_SCALARS[kind]).itemsize
    return _read_numbers(cursor, kind, cursor.count(f"values of {key!r}", MAX_ARRAY, size), key)


def _read_strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    """An array of strings: one tight loop over each window, then one decode a string."""
    strings: list[str] = []
    length_at: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
    while len(strings) < count:
        window, start = cursor.view(8)
        at, last = start, len(window) - 8
        pieces: list[bytes] = []
        for _ in range(count - len(strings)):
            if at > last:
                break
            end = at + 8 + length_at(window, at)[0]
            if end > len(window):
                break
            pieces.append(window[at + 8 : end])
            at = end
        try:
            strings += map(bytes.decode, pieces)
        except UnicodeDecodeError:
            raise cursor.fail(f"a string of {key!r} is not UTF-8; the file is damaged") from None
        cursor.position += at - start
        if not pieces:  # longer than what is left of the window
            strings.append(cursor.text(f"a string of {key!r}", MAX_TEXT))
    return strings


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= 1 << 20 or value & (value - 1):
        raise CheckpointError(
            f"{cursor.path}: general.alignment is {value!r}, not a power of two up to 1 MiB"
        )
    return value


def _read_row(cursor: _Cursor) -> GGUFTensor:
    """One row of the table; its offset still counts from the start of the weights."""
    name = cursor.text("a tensor name", MAX_NAME)
    num_dims = cursor.number("<I")
    if not 1 <= num_dims <= 4:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to 4 can be")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    kind = cursor.number("<I")
    if kind not in TYPES:
        raise UnsupportedError(f"{cursor.path}: tensor {name!r} has the unknown ggml type {kind}")
    values = math.prod(dims)
    if not 0 < values < 1 << 48 or dims[0] % TYPES[kind].values:
        raise cursor.fail(
            f"tensor {name!r} of type {TYPES[kind].name} cannot have dimensions {dims}: rows are "
            f"whole blocks of {TYPES[kind].values}; the file is damaged"
        )
    nbytes = values // TYPES[kind].values * TYPES[kind].block_bytes
    return GGUFTensor(name, dims[::-1], TYPES[kind], cursor.number("<Q"), nbytes)


def _place(
    cursor: _Cursor, rows: list[GGUFTensor], base: int, alignment: int
) -> dict[str, GGUFTensor]:
    """Check where every tensor lies; files are written without gaps, in the table's order."""
    tensors: dict[str, GGUFTensor] = {}
    expected = 0
    for row in rows:
        if row.name in tensors:
            raise CheckpointError(
                f"{cursor.path}: tensor {row.name!r} stands in the table twice; it is damaged"
            )
        if row.offset != expected:
            raise CheckpointError(
                f"{cursor.path}: tensor {row.name!r} is announced at offset {row.offset}, but the "
                f"tensors before it end at {expected}; the table is damaged"
            )
        tensors[row.name] = GGUFTensor(row.name, row.shape, row.type, base + row.offset, row.nbytes)
        expected += row.nbytes + -row.nbytes % alignment
    end = max((item.offset + item.nbytes for item in tensors.values()), default=0)
    if end > cursor.size:
        raise _short(cursor, list(tensors.values()), end)
    return tensors


def _short(cursor: _Cursor, tensors: list[GGUFTensor], end: int) -> CheckpointError:
    whole = [item for item in tensors if item.offset + item.nbytes <= cursor.size]
    first = tensors[len(whole)].name
    return CheckpointError(
        f"{cursor.path} is short: it has {cursor.size} bytes of {end}, {len(whole)} of "
        f"{len(tensors)} tensors are whole and {first!r} is the first that is not; the file is cut "
        "or its download did not finish: resume or repeat the download"
    )

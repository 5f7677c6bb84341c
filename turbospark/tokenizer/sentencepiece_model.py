"""Reading and writing the few fields of sentencepiece's model file that turbospark needs.

The file is one protocol buffer, `ModelProto` of sentencepiece_model.proto: field 1 repeats the
pieces (text, score, type), field 2 is the trainer's settings, field 3 the normaliser's.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from turbospark.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PIECE_TYPES = frozenset({NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE})

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_MODEL_BPE = 2

NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""Appended to a model: the normaliser adds no space. Repeated messages merge, the last one wins."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """How sentencepiece treats white space.

    Attributes:
        add_dummy_prefix: a space is put before every text.
        remove_extra_whitespaces: runs of spaces become one, and outer ones vanish.
    """

    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def write_bpe_model(
    pieces: Iterable[tuple[str, float, int]], *, add_dummy_prefix: bool, byte_fallback: bool
) -> bytes:
    """Serialise a BPE model that merges by score.

    Args:
        pieces: text, score and type of each id; texts are pairwise different and not empty.
        add_dummy_prefix: put a space before every text.
        byte_fallback: characters without a piece become byte pieces, all 256 of which exist.
    """
    tail = struct.Struct("<BfBB").pack  # tag of the score, score, tag of the type, type
    out = bytearray()
    for text, score, kind in pieces:
        data = text.encode()
        out += _piece_head(len(data)) + data + tail(0x15, score, 0x18, kind)
    trainer = bytes((0x18, _MODEL_BPE)) + b"\x98\x02" + bytes((byte_fallback,))
    normalizer = bytes((0x18, add_dummy_prefix, 0x20, False, 0x28, True))
    out += b"\x12" + _varint(len(trainer)) + trainer
    out += b"\x1a" + _varint(len(normalizer)) + normalizer
    return bytes(out)


def read_normalizer(model: bytes, source: str) -> Normalizer:
    """Read how a serialised model treats white space, and check the file's outline.

    Raises:
        TokenizerError: the file is cut short, is no protocol buffer, or lacks a part; names it.
    """
    try:
        parts = dict(_fields(model, skip=1))
        settings = parts.get(3)
        values = dict(_fields(settings)) if isinstance(settings, bytes) else None
    except (IndexError, ValueError):
        raise TokenizerError(
            f"{source} is not a whole sentencepiece model: its outline breaks off; "
            "download it again"
        ) from None
    if values is None or 2 not in parts:
        raise TokenizerError(
            f"{source} is not a whole sentencepiece model: the settings that end it are missing; "
            "download it again"
        )
    charsmap = values.get(2, b"")
    if charsmap:
        _check_charsmap(charsmap, source)
    return Normalizer(bool(values.get(3, True)), bool(values.get(4, True)))


@cache
def _piece_head(text_bytes: int) -> bytes:
    """What precedes the text of a piece: tag and length of the piece, then of its text."""
    text_head = b"\x0a" + _varint(text_bytes)
    return b"\x0a" + _varint(len(text_head) + text_bytes + 7) + text_head


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than ten bytes")


def _fields(data: bytes, skip: int = 0) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message; the values of field `skip` are not read."""
    position, end, skipped = 0, len(data), skip << 3 | _BYTES
    while position < end:
        tag = data[position]
        if tag == skipped and data[position + 1] < 0x80:
            position += 2 + data[position + 1]
            continue
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _read_varint(data, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            width, position = _read_varint(data, position)
        else:
            width = _FIXED_WIDTHS.get(kind, -1)
        if width < 0 or position + width > end:
            raise ValueError("a field that does not end inside its message")
        if tag != skipped:
            yield tag >> 3, data[position : position + width]
        position += width


def _check_charsmap(charsmap: int | bytes, source: str) -> None:
    """Check that no step of the character map's double-array trie leaves its memory.

    The blob is the trie's size in bytes, its 32-bit units, and the replacement texts. A unit holds
    an offset (bits 10 up, times 256 when bit 9 is set) that is XORed with the unit's place and a
    label; a unit with bit 31 is a leaf whose other bits point into the texts.
    """
    import numpy as np

    if isinstance(charsmap, bytes) and len(charsmap) > 4:
        (trie_bytes,) = struct.unpack_from("<I", charsmap)
        if trie_bytes % 1024 == 0 and 0 < trie_bytes < len(charsmap) - 4:
            units = np.frombuffer(charsmap, "<u4", trie_bytes // 4, 4).astype(np.int64)
            texts = charsmap[4 + trie_bytes :]
            is_leaf = units >> 31 != 0
            offsets = (units >> 10) << ((units & 0x200) >> 6)
            reach = (np.arange(len(units)) ^ offsets) | 0xFF
            steps_fit = bool((reach[~is_leaf] < len(units)).all())
            leaves_fit = bool(((units[is_leaf] & 0x7FFFFFFF) < len(texts)).all())
            if steps_fit and leaves_fit and texts.endswith(b"\0"):
                return
    raise TokenizerError(f"{source}: its map of characters is damaged; download the file again")

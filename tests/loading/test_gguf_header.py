"""GGUF headers: every count, length, type and offset is checked before it is used."""

import os
import struct
import time

import pytest
from loading.files import (
    gguf_bytes,
    gguf_metadata,
    gguf_tensors,
    text,
    write_gguf,
)

from turbospark.errors import CheckpointError, UnsupportedError
from turbospark.loading.gguf import GGUFFile

TENSORS = {
    "a.weight": (0, (3, 5), bytes(range(60))),
    "b.weight": (1, (7,), bytes(range(14))),
    "c.weight": (0, (2, 1, 3), bytes(range(24))),
}


def write(path, raw):
    path.write_bytes(raw)
    return path


def refused(path, raw, *words, kind=CheckpointError):
    started = time.perf_counter()
    with pytest.raises(kind) as caught:
        GGUFFile(write(path / "broken.gguf", raw))
    assert time.perf_counter() - started < 2
    for word in ("broken.gguf", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_header_gives_metadata_and_the_place_of_every_tensor(tmp_path, version, alignment):
    metadata = {
        "general.alignment": alignment, "a.text": "čau", "a.float": 0.5, "a.flag": True,
        "a.words": ["x", "", "日本語"], "a.numbers": [-3, 5], "a.reals": [0.25, -2.0],
    }  # fmt: skip
    raw = gguf_bytes(metadata, TENSORS, version, alignment)
    file = GGUFFile(write(tmp_path / "a.gguf", raw))
    assert file.metadata == metadata
    assert file.version == version
    assert [item.shape for item in file.tensors.values()] == [(3, 5), (7,), (2, 1, 3)]
    for name, (_, _, content) in TENSORS.items():
        place = file.tensors[name]
        assert raw[place.offset : place.offset + place.nbytes] == content
        assert place.offset % alignment == 0


def test_every_scalar_type_is_read(tmp_path):
    kinds = [(0, "B", 200), (1, "b", -7), (2, "H", 60000), (3, "h", -300), (4, "I", 1 << 31),
             (5, "i", -5), (10, "Q", 1 << 63), (11, "q", -(1 << 40)), (12, "d", 0.1)]  # fmt: skip
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, len(kinds))
    for number, layout, value in kinds:
        raw += text(f"k{number}") + struct.pack("<I" + layout, number, value)
    metadata = GGUFFile(write(tmp_path / "a.gguf", raw)).metadata
    assert metadata == {f"k{number}": value for number, _, value in kinds}


def test_nested_arrays_are_read_and_bounded(tmp_path):
    inner = struct.pack("<IQ2H", 2, 2, 11, 13)
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
    nested = raw + struct.pack("<IIQ", 9, 9, 2) + inner + inner
    assert GGUFFile(write(tmp_path / "a.gguf", nested)).metadata == {"k": [[11, 13], [11, 13]]}
    deep = raw + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + struct.pack("<IQ", 0, 1)
    refused(tmp_path, deep + b"x" * 20, "nests")


def test_strings_longer_than_the_read_window_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("turbospark.loading.gguf_header.WINDOW", 64)
    words = ["short", "x" * 1000, "", "y" * 63, "z" * 200]
    metadata = {"a.words": words, "a.text": "t" * 500, "a.end": 3}
    file = GGUFFile(write(tmp_path / "a.gguf", gguf_bytes(metadata, TENSORS)))
    assert file.metadata == metadata


def test_a_vocabulary_of_262144_tokens_is_read_quickly(tmp_path):
    words = [f"token{i}" for i in range(262_144)]
    path = write(tmp_path / "a.gguf", gguf_bytes({"a.words": words}, {}))
    started = time.perf_counter()
    assert GGUFFile(path).metadata["a.words"] == words
    assert time.perf_counter() - started < 1.0


def test_foreign_files_are_refused_by_name(tmp_path):
    refused(tmp_path, b"", "empty")
    refused(tmp_path, b"PK\x03\x04" + bytes(90), "not a GGUF file")
    refused(tmp_path, b"ggjt" + bytes(90), "not a GGUF file")
    refused(tmp_path, b"GG", "not a GGUF file")
    good = gguf_bytes({}, TENSORS)
    refused(tmp_path, good[:4] + struct.pack(">I", 3) + good[8:], "big-endian",
            kind=UnsupportedError)  # fmt: skip
    for version in (0, 1, 4):
        refused(tmp_path, good[:4] + struct.pack("<I", version) + good[8:], f"version {version}",
                kind=UnsupportedError)  # fmt: skip


def test_corrupt_counts_neither_hang_nor_allocate(tmp_path):
    good = gguf_bytes(gguf_metadata(), gguf_tensors())
    for count in (1 << 17, 1 << 31, 1 << 62, (1 << 64) - 1):
        packed = struct.pack("<Q", count)
        refused(tmp_path, good[:8] + packed + good[16:], "announced")
        refused(tmp_path, good[:16] + packed + good[24:], "announced")
        key = good.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
        refused(tmp_path, good[:key] + packed + good[key + 8 :], "announced")
        refused(tmp_path, good[:24] + packed + good[32:], "metadata key")


def test_a_count_within_the_file_but_beyond_any_vocabulary_is_refused(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 25)
    path = write(tmp_path / "broken.gguf", head)
    os.truncate(path, 1 << 30)  # a sparse gigabyte of empty strings
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match="announced"):
        GGUFFile(path)
    assert time.perf_counter() - started < 1


def test_repeated_names_are_refused(tmp_path):
    entry = text("k.k") + struct.pack("<II", 4, 1)
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry
    refused(tmp_path, raw, "'k.k'", "twice")
    row = text("w") + struct.pack("<IQIQ", 1, 8, 0, 0)
    again = text("w") + struct.pack("<IQIQ", 1, 8, 0, 32)
    raw = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + row + again + bytes(128)
    refused(tmp_path, raw, "'w'", "twice")


def test_wrong_types_and_dimensions_are_refused(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w")
    tail = bytes(256)
    refused(tmp_path, head + struct.pack("<IQIQ", 1, 8, 77, 0) + tail, "'w'", "type 77",
            kind=UnsupportedError)  # fmt: skip
    refused(tmp_path, head + struct.pack("<IQIQ", 1, 31, 8, 0) + tail, "'w'", "Q8_0", "blocks")
    refused(tmp_path, head + struct.pack("<IQIQ", 1, 0, 0, 0) + tail, "'w'")
    refused(tmp_path, head + struct.pack("<IIQ", 0, 0, 0) + tail, "0 dimensions")
    refused(tmp_path, head + struct.pack("<I5QIQ", 5, 1, 1, 1, 1, 1, 0, 0) + tail, "5 dimensions")
    huge = struct.pack("<I4QIQ", 4, 1 << 62, 1 << 62, 1 << 62, 8, 0, 0)
    refused(tmp_path, head + huge + tail, "'w'")
    refused(tmp_path, head.replace(text("w"), text(b"\xff")) + tail, "UTF-8")
    value = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
    refused(tmp_path, value + struct.pack("<I", 13) + tail, "value type 13")
    refused(tmp_path, value + struct.pack("<IIQ", 9, 13, 1) + tail, "value type 13")
    refused(tmp_path, value + struct.pack("<IB", 7, 2) + tail, "neither 0 nor 1")
    refused(tmp_path, value + struct.pack("<IQ", 8, 2) + b"\xff\xfe" + tail, "UTF-8")


@pytest.mark.parametrize("alignment", [0, 12, 1 << 21, "32"])
def test_an_unusable_alignment_is_refused(tmp_path, alignment):
    refused(tmp_path, gguf_bytes({"general.alignment": alignment}, {}), "general.alignment")


def test_an_offset_that_does_not_follow_its_neighbours_is_told_from_a_short_file(tmp_path):
    good = gguf_bytes({}, TENSORS)
    row = good.index(b"b.weight") + len("b.weight") + 4 + 8 + 4
    assert struct.unpack_from("<Q", good, row) == (64,)
    for offset in (0, 32, 65, 96, 1 << 40, (1 << 64) - 1):
        broken = good[:row] + struct.pack("<Q", offset) + good[row + 8 :]
        refused(tmp_path, broken, "'b.weight'", f"offset {offset}", "table is damaged")


def test_a_cut_file_says_how_much_is_there_and_which_tensor_is_the_first_to_lack(tmp_path):
    good = gguf_bytes({}, TENSORS)
    end = len(good) - (-24 % 32)
    GGUFFile(write(tmp_path / "a.gguf", good[:end]))  # padding at the end may be missing
    cut = good[: end - 1]
    refused(tmp_path, cut, f"{end - 1} bytes of {end}", "2 of 3", "'c.weight'", "download")
    refused(tmp_path, good[: end - 45], "1 of 3", "'b.weight'")


@pytest.mark.parametrize("length", [5, 9, 17, 23, 40, 300, 4000])
def test_a_file_cut_inside_the_header_says_so(tmp_path, length):
    refused(tmp_path, gguf_bytes(gguf_metadata(), gguf_tensors())[:length], "announced")


def test_a_part_of_a_split_file_is_refused_with_the_command_that_joins(tmp_path):
    raw = gguf_bytes({"split.count": 3, "split.no": 0}, TENSORS)
    refused(tmp_path, raw, "split into 3", "llama-gguf-split --merge", kind=UnsupportedError)


def test_a_file_that_shrinks_after_its_header_was_read_is_noticed(tmp_path):
    path = write_gguf(tmp_path / "a.gguf")
    file = GGUFFile(path)
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=r"a\.gguf became shorter"):
        file.read(list(file.tensors)[-1])

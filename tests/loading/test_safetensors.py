"""Safetensors headers: lengths, shapes and offsets are held against each other and the file."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest
from loading.files import bfloat16, safetensors_bytes

from turbospark.errors import CheckpointError
from turbospark.loading.safetensors import load_file, read_slots

TENSORS = {
    "a": np.arange(15, dtype=np.float32).reshape(3, 5),
    "b": bfloat16(np.arange(7)),
    "c": np.arange(6, dtype=np.float16).reshape(1, 2, 3),
    "codes": np.arange(4, dtype=np.uint32),
    "empty": np.zeros((0, 3), np.float32),
    "one": np.float32(5).reshape(()),
}


def write(path, raw):
    path.write_bytes(raw)
    return path


def refused(tmp_path, raw, *words):
    path = write(tmp_path / "broken.safetensors", raw)
    with pytest.raises(CheckpointError) as caught:
        load_file(path, read_slots(path))
    for word in ("broken.safetensors", *words):
        assert word in str(caught.value)


def with_header(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_are_those_of_the_file_bit_for_bit(tmp_path):
    path = write(tmp_path / "a.safetensors", safetensors_bytes(TENSORS))
    slots = read_slots(path)
    arrays = load_file(path, slots)
    assert list(slots) == list(TENSORS)
    assert slots["b"].dtype == mx.bfloat16
    raw = path.read_bytes()
    for name, expected in TENSORS.items():
        slot, array = slots[name], arrays[name]
        assert raw[slot.offset : slot.offset + slot.nbytes] == expected.tobytes()
        assert array.shape == expected.shape
        plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        assert np.asarray(plain).tobytes() == expected.tobytes()


def test_tensors_are_read_only_when_they_are_evaluated(tmp_path):
    big = {"big": np.ones((1 << 22,), np.float32), "small": np.ones(3, np.float32)}
    path = write(tmp_path / "a.safetensors", safetensors_bytes(big))
    before = mx.get_active_memory()
    arrays = load_file(path, read_slots(path))
    mx.eval(arrays["small"])
    assert mx.get_active_memory() - before < 1 << 20


def test_zero_bytes_and_cut_headers_name_the_file(tmp_path):
    good = safetensors_bytes(TENSORS)
    refused(tmp_path, b"", "empty (0 bytes)")
    refused(tmp_path, good[:5], "short")
    refused(tmp_path, good[:100], "short", "100")
    refused(tmp_path, struct.pack("<Q", 1 << 62) + good[8:], "short")
    refused(tmp_path, struct.pack("<Q", 0) + good[8:], "header of 0 bytes")


def test_a_truncated_file_says_how_much_is_there(tmp_path):
    good = safetensors_bytes(TENSORS)
    refused(tmp_path, good[:-1], f"{len(good) - 1} bytes of {len(good)}", "5 of 6", "download")


def test_trailing_bytes_are_refused(tmp_path):
    refused(tmp_path, safetensors_bytes(TENSORS) + b"x", "1 bytes after")


def test_a_git_lfs_pointer_is_called_by_its_name(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    refused(tmp_path, pointer, "Git LFS pointer", "git lfs pull")


def test_headers_that_are_no_json_object_are_refused(tmp_path):
    refused(tmp_path, with_header(b"{'a'}"), "damaged header")
    refused(tmp_path, with_header(b"[1]"), "damaged header")
    refused(tmp_path, with_header(b"\xff\xfe{}"), "damaged header")
    refused(tmp_path, with_header(b"[" * 100_000), "damaged header")
    one = json.dumps(entry()).encode()
    twice = b'{"a":' + one + b',"a":' + one + b"}"
    refused(tmp_path, with_header(twice, bytes(8)), "damaged header", "'a'", "twice")


@pytest.mark.parametrize(
    "broken",
    [
        5, None, {}, entry(shape=None), entry(shape=[-2]), entry(shape=[2.0]), entry(shape=[True]),
        entry(offsets=[0]), entry(offsets=[8, 0]), entry(offsets=[-8, 0]), entry(offsets="08"),
        entry(offsets=[0, 1e3]), entry(shape=[1] * 40),
    ],
)  # fmt: skip
def test_malformed_entries_are_refused(tmp_path, broken):
    refused(tmp_path, with_header({"w": broken}, bytes(8)), "'w'")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F64", "C64", "f32", "", None, 7])
def test_unknown_types_are_refused_by_name(tmp_path, dtype):
    refused(tmp_path, with_header({"w": entry(dtype=dtype)}, bytes(8)), "'w'", repr(dtype))


def test_shape_and_offsets_must_agree(tmp_path):
    refused(tmp_path, with_header({"w": entry(shape=[3])}, bytes(8)), "'w'", "12 bytes")
    refused(tmp_path, with_header({"w": entry(dtype="F16")}, bytes(8)), "'w'", "4 bytes")
    huge = entry(shape=[1 << 40, 1 << 40])
    refused(tmp_path, with_header({"w": huge}, bytes(8)), "'w'", "takes")
    beyond = entry(shape=[1 << 40], offsets=[0, 1 << 42])
    refused(tmp_path, with_header({"w": beyond}, bytes(8)), "short")


def test_overlaps_and_holes_are_refused(tmp_path):
    header = {"a": entry(), "b": entry(offsets=(4, 12))}
    refused(tmp_path, with_header(header, bytes(12)), "'b'", "overlaps")
    header = {"a": entry(), "b": entry(offsets=(12, 20))}
    refused(tmp_path, with_header(header, bytes(20)), "'b'", "hole")
    refused(tmp_path, with_header({"a": entry(offsets=(4, 12))}, bytes(12)), "'a'", "hole")

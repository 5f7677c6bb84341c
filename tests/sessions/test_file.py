"""The container of a saved session: whole and unchanged, or refused."""

import errno
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turbospark.errors import CheckpointError, OptionError, SourceError
from turbospark.sessions import file as session_file
from turbospark.sessions.file import read_file, write_file

VALUES = {"name": "älice", "messages": [{"role": "user", "content": "👩‍👧\n"}], "pending": None}
ARRAYS = {
    "rows": mx.arange(30, dtype=mx.float32).reshape(2, 3, 5),
    "half": mx.arange(7, dtype=mx.float32).astype(mx.bfloat16),
    "none": mx.zeros((3, 0, 5), mx.float16),
    "one": mx.array(3, mx.int64),
    "strided": mx.arange(100, dtype=mx.int32)[::7],
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write_file(tmp_path / "alice.tsession", VALUES, ARRAYS)


def test_what_was_written_is_read(saved: Path) -> None:
    values, arrays = read_file(saved)
    assert values == VALUES
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert mx.array_equal(arrays[name], array)


def test_it_is_a_safetensors_file(saved: Path) -> None:
    arrays, metadata = mx.load(str(saved), format="safetensors", return_metadata=True)
    assert mx.array_equal(arrays["rows"], ARRAYS["rows"])
    assert metadata["format"] == "turbospark session"


def test_any_changed_or_missing_byte_is_refused(saved: Path) -> None:
    raw, broken = saved.read_bytes(), saved.with_name("broken")
    rng = np.random.default_rng(3)
    for at in [*range(9), *rng.integers(9, len(raw), 60).tolist()]:
        changed = bytearray(raw)
        changed[at] ^= 1 << int(rng.integers(8))
        broken.write_bytes(changed)
        with pytest.raises(CheckpointError, match="broken"):
            read_file(broken)
        broken.write_bytes(raw[:at])
        with pytest.raises(CheckpointError, match=r"cut short|damaged"):
            read_file(broken)
    broken.write_bytes(raw + b"x")
    with pytest.raises(CheckpointError, match="bytes follow its header"):
        read_file(broken)


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"x": mx.zeros(3)})
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no session file"):
        read_file(path)
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(104 bytes\) is no session"):
        read_file(path)
    path.write_bytes((4).to_bytes(8, "little") + b"[[]]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        read_file(path)
    for metadata in ([1], {"format": 3}, None):
        header = json.dumps({"__metadata__": metadata}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match="does not say"):
            read_file(path)


def test_another_version_is_refused_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_file, "VERSION", 7)
    path = write_file(tmp_path / "a", VALUES, ARRAYS)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version '7', and this turbospark reads version 1"):
        read_file(path)


def test_no_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nobody.tsession", tmp_path):
        with pytest.raises(SourceError, match=str(path)):
            read_file(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no" / "folder" / "a.tsession"
    with pytest.raises(OptionError, match=r"cannot be saved as .*a\.tsession: No such file"):
        write_file(path, VALUES, ARRAYS)
    with pytest.raises(OptionError, match="cannot be saved as"):
        write_file(tmp_path, VALUES, ARRAYS)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OptionError, match="No space left"):
        write_file(saved, {}, {})
    assert read_file(saved)[0] == VALUES
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_the_new_file_takes_the_place_of_the_old_one_in_one_step(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Path, __: Path) -> Path:
        assert read_file(saved)[0] == VALUES
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(OptionError, match="Input/output error"):
        write_file(saved, {}, {})
    assert read_file(saved)[0] == VALUES
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_link_stays_and_leads_to_the_new_file(saved: Path) -> None:
    link = saved.parent / "folder" / "newest"
    link.parent.mkdir()
    link.symlink_to("../alice.tsession")
    write_file(link, {"name": "new"}, {})
    assert link.is_symlink()
    assert read_file(saved)[0] == {"name": "new"}
    assert [path.name for path in link.parent.iterdir()] == ["newest"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        with pytest.raises(OptionError, match=f"saved as {place}: it is no regular file"):
            write_file(place, VALUES, ARRAYS)
        with pytest.raises(SourceError, match=f"read from {place}: it is no regular file"):
            read_file(place)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_value_that_json_cannot_hold_is_refused_before_anything_is_written(saved: Path) -> None:
    with pytest.raises(OptionError, match="not JSON serializable"):
        write_file(saved, {"messages": [{"content": object()}]}, {})
    assert read_file(saved)[0] == VALUES


@pytest.mark.parametrize("path", [None, 5, b"a"])
def test_what_is_no_path_is_refused_by_type(path: object) -> None:
    for call in (lambda: read_file(path), lambda: write_file(path, VALUES, ARRAYS)):  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=f"of type {type(path).__name__}: give a path"):
            call()


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_no_file_can_have_is_refused(path: str) -> None:
    with pytest.raises(OptionError, match="cannot be saved as"):
        write_file(path, VALUES, ARRAYS)
    with pytest.raises(SourceError, match="no session can be read from"):
        read_file(path)

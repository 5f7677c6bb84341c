"""The packaged demo model is joined once, checked by hash, and heals."""

import errno
import fcntl
import hashlib
import sys
import types

import pytest

from turbospark.errors import CheckpointError, SourceError
from turbospark.loading import demo
from turbospark.loading.demo import demo_file, install_command
from turbospark.loading.source import resolve_source

PARTS = [b"GGUF" + bytes(range(200)), b"", b"x" * 999]
WHOLE = b"".join(PARTS)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in the place of the demo's, and an empty cache folder."""
    module = types.ModuleType(demo.PACKAGE)
    paths = [tmp_path / f"part{i}" for i in range(len(PARTS))]
    for path, content in zip(paths, PARTS, strict=True):
        path.write_bytes(content)
    module.MODEL_NAME = "small.gguf"
    module.EXPECTED_SHA256 = hashlib.sha256(WHOLE).hexdigest()
    module.chunk_paths = lambda: paths
    monkeypatch.setitem(sys.modules, demo.PACKAGE, module)
    monkeypatch.setenv("TURBOSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "BLOCK_BYTES", 64)
    module.paths = paths
    return module


def left_behind(path):
    return [item.name for item in path.parent.iterdir() if item != path]


def test_parts_are_joined_under_the_cache_folder(package, tmp_path):
    calls = []
    path = demo_file(lambda done, total: calls.append((done, total)))
    assert path.read_bytes() == WHOLE
    assert tmp_path / "cache" in path.parents
    assert path.name == "small.gguf"
    assert left_behind(path) == []
    assert calls[0] == (64, len(WHOLE))
    assert calls[-1] == (len(WHOLE), len(WHOLE))
    assert resolve_source("demo").path == path


def test_second_call_joins_nothing(package, monkeypatch):
    path = demo_file()
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(demo, "_join", None)
    assert demo_file() == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", [b"", WHOLE[:-1], WHOLE + b"x"])
def test_file_of_another_size_is_joined_again(package, damage):
    path = demo_file()
    path.write_bytes(damage)
    assert demo_file().read_bytes() == WHOLE


def test_cache_folder_that_cannot_be_made_is_named_with_the_way_out(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("TURBOSPARK_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(SourceError, match=r"file/below/demo/.*TURBOSPARK_CACHE"):
        demo_file()


def test_full_disk_leaves_nothing_and_heals(package, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(demo.os, "fsync", full)
        with pytest.raises(SourceError, match=r"No space left on device.*TURBOSPARK_CACHE"):
            demo_file()
    path = demo_file()
    assert path.read_bytes() == WHOLE
    assert left_behind(path) == []


def test_interrupted_join_leaves_nothing_and_heals(package):
    def interrupt(done, total):
        if done > 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_file(interrupt)
    folder = next((package.paths[0].parent / "cache" / "demo").iterdir())
    assert list(folder.iterdir()) == []
    assert demo_file().read_bytes() == WHOLE


def test_leftovers_of_a_killed_join_are_dropped_and_those_of_a_live_one_kept(package):
    path = demo_file()
    killed, living = (path.parent / f".{path.name}.{end}" for end in ("abc123", "def456"))
    for leftover in (killed, living):
        leftover.write_bytes(WHOLE[:100])
    path.unlink()
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert demo_file().read_bytes() == WHOLE
    assert not killed.exists()
    assert living.exists()


def test_a_join_holds_its_temporary_file_against_another(package):
    seen = []

    def join_beside(done, total):
        if not seen:
            seen.append(demo_file().read_bytes())

    assert demo_file(join_beside).read_bytes() == WHOLE
    assert seen == [WHOLE]


def test_corrupt_part_is_refused_and_leaves_nothing(package):
    package.paths[2].write_bytes(b"y" * 999)
    with pytest.raises(CheckpointError, match="sha256") as caught:
        demo_file()
    assert install_command() in str(caught.value)
    folder = next((package.paths[0].parent / "cache" / "demo").iterdir())
    assert list(folder.iterdir()) == []


def test_missing_part_is_named(package):
    package.paths[1].unlink()
    with pytest.raises(SourceError, match="part1"):
        demo_file()

    def chunk_paths():
        raise ModuleNotFoundError("No module named 'part3'", name="part3")

    package.chunk_paths = chunk_paths
    with pytest.raises(SourceError, match="part3"):
        demo_file()


@pytest.mark.parametrize(
    ("platform", "command"),
    [("linux", 'pip install "turbospark[cpu,demo]"'), ("darwin", 'pip install "turbospark[demo]"')],
)
def test_absent_package_names_the_one_command_that_installs_it(monkeypatch, platform, command):
    monkeypatch.setitem(sys.modules, demo.PACKAGE, None)
    monkeypatch.setattr(sys, "platform", platform)

    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(demo.importlib, "import_module", absent)
    with pytest.raises(SourceError) as caught:
        demo_file()
    assert command in str(caught.value)
    assert not isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_broken_import_inside_the_package_is_not_hidden(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(demo.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="other"):
        demo_file()

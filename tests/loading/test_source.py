"""Paths lead to folders and files, Hub ids to the Hub, and nothing that looks like a path there."""

import errno
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from loading.files import gguf_bytes, write_folder, write_gguf
from loading.hub_files import serve_hub

from turbospark.errors import SourceError, UnsupportedError
from turbospark.loading.plan import plan
from turbospark.loading.source import as_hub_id, local_source, looks_like_path, resolve_source


@pytest.fixture
def no_hub(monkeypatch):
    """Fail the test when anything asks the Hub."""

    def asked(*args, **options):
        raise AssertionError(f"the Hub was asked for {args} {options}")

    for name in ("snapshot_download", "list_repo_files", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, asked)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return serve_hub(tmp_path, monkeypatch)


def refused(given, *words, kind=SourceError, **options):
    with pytest.raises(kind) as caught:
        resolve_source(given, **options)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_missing_paths_are_path_errors_and_never_asked_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "here" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for text in (
        "./missing", "../missing/model", "/no/such/model", "~/no-such-model", "models/missing",
        "missing", "a/b/c", "owner/model.gguf", "owner/name/", "owner/model.safetensors",
        "with space/name", "C:\\models\\x", ".", "..",
    ):  # fmt: skip
        if text in {".", ".."}:
            refused(text, "holds")
        else:
            refused(text, "no such file or folder", text)
    refused(tmp_path / "owner" / "name", "no such file or folder")


@pytest.mark.usefixtures("no_hub")
def test_missing_path_names_the_last_folder_that_exists(tmp_path):
    refused(str(tmp_path / "models" / "llama"), str(tmp_path))


@pytest.mark.usefixtures("no_hub")
def test_folders_and_files_are_told_apart(tmp_path):
    folder = write_folder(tmp_path / "hf")
    assert resolve_source(folder).kind == "safetensors"
    assert resolve_source(str(folder)).path == folder
    file = write_gguf(tmp_path / "model.gguf")
    assert resolve_source(file) == local_source(file)
    assert local_source(file).kind == "gguf"
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(file, alone)
    assert local_source(alone).path == alone / "model.gguf"
    shutil.copy(file, alone / "mmproj-model-f16.gguf")
    assert local_source(alone).path == alone / "model.gguf"
    shutil.copy(file, alone / "second.gguf")
    refused(alone, "2 GGUF files", "model.gguf", "second.gguf")
    shutil.copy(file, folder)
    assert local_source(folder).kind == "safetensors"
    shutil.copy(file, tmp_path / "no_ending")
    assert local_source(tmp_path / "no_ending").kind == "gguf"


@pytest.mark.usefixtures("no_hub")
def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "hf")
    assert resolve_source("~/hf").path == tmp_path / "hf"


@pytest.mark.usefixtures("no_hub")
def test_files_of_a_checkpoint_point_to_their_folder(tmp_path):
    folder = write_folder(tmp_path / "hf")
    for name in ("model.safetensors", "config.json"):
        refused(folder / name, str(folder), "folder")
    (tmp_path / "notes.txt").write_text("no")
    refused(tmp_path / "notes.txt", "neither a folder nor a GGUF file")


@pytest.mark.usefixtures("no_hub")
def test_folders_without_a_checkpoint_say_what_they_are(tmp_path):
    folder = tmp_path / "some"
    folder.mkdir()
    refused(folder, "neither config.json")
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "no config.json")
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "LoRA adapter")
    parent = tmp_path / "parent"
    write_folder(parent / "inside")
    refused(parent, "inside")


@pytest.mark.usefixtures("no_hub")
def test_split_gguf_says_what_is_there_and_how_to_join(tmp_path):
    for part in (1, 3):
        write_gguf(tmp_path / f"big-{part:05d}-of-00003.gguf")
    for given in (tmp_path, tmp_path / "big-00003-of-00003.gguf"):
        refused(
            given, "split into 3 parts", "2 of which", "missing: big-00002-of-00003.gguf",
            "llama-gguf-split --merge big-00001-of-00003.gguf big.gguf", kind=UnsupportedError,
        )  # fmt: skip


@pytest.mark.usefixtures("no_hub")
def test_reserved_names_and_options_that_do_not_apply_are_refused(tmp_path):
    refused("embedded", "embedded")
    refused(write_folder(tmp_path / "hf"), "revision", revision="main")
    refused("demo", "revision", revision="main")


def test_hub_id_downloads_only_the_files_of_a_checkpoint(hub):
    write_folder(hub.folder)
    (hub.folder / "onnx").mkdir()
    (hub.folder / "onnx" / "model.onnx").write_bytes(b"")
    source = resolve_source("owner/name", revision="v1")
    assert (source.kind, source.path) == ("safetensors", hub.cache)
    assert "onnx/model.onnx" not in hub.fetched()
    (_, repo, options) = hub.asked[-1]
    assert repo == "owner/name"
    assert options["revision"] == "v1"
    assert options["ignore_patterns"] == ["*/*"]
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern or pattern == "*" for pattern in options["allow_patterns"])


def test_hub_id_of_one_gguf_file_downloads_that_file(hub):
    write_gguf(hub.folder / "model-Q4_K_M.gguf")
    assert resolve_source("owner/name").path == hub.cache / "model-Q4_K_M.gguf"
    assert hub.asked[-1][2]["allow_patterns"] == ["model-Q4_K_M.gguf"]


def test_hub_id_of_many_gguf_files_wants_one_named(hub):
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        write_gguf(hub.folder / name)
    refused("owner/name", "2 GGUF files", "hf://owner/name/a-Q4_0.gguf", "a-Q8_0.gguf")
    assert resolve_source("hf://owner/name/a-Q8_0.gguf").path == hub.cache / "a-Q8_0.gguf"
    refused("hf://owner/name/a-Q9_0.gguf", "a-Q9_0.gguf")
    refused("hf://owner", "no Hub id")
    refused("hf://owner/name/model.safetensors", "no Hub id")


def test_hub_id_without_weights_says_what_is_there(hub):
    (hub.folder / "pytorch_model.bin").write_bytes(b"")
    refused("owner/name", "neither safetensors nor GGUF", "pytorch_model.bin")


def test_local_folder_of_the_owners_name_makes_the_id_a_path(hub, tmp_path):
    (tmp_path / "owner").mkdir()
    refused("owner/name", "no such file or folder", "hf://owner/name")
    assert hub.asked == []
    write_folder(hub.folder)
    assert resolve_source("hf://owner/name").path == hub.cache


def test_local_files_only_does_not_list_the_repository(hub):
    write_folder(hub.cache)
    resolve_source("owner/name", local_files_only=True)
    assert [kind for kind, *_ in hub.asked] == ["look up"]


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OfflineModeIsEnabled("offline"), "cannot be reached"),
        (ConnectionError("no route"), "cannot be reached"),
        (TimeoutError("slow"), "cannot be reached"),
        (LocalEntryNotFoundError("nothing"), "cannot be reached"),
        (RuntimeError("odd"), "RuntimeError: odd"),
    ],
)
def test_errors_of_the_hub_client_become_one_sentence(hub, monkeypatch, error, word):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("owner/name", "owner/name", word)
    refused("owner/name", "not downloaded before", local_files_only=True)
    assert hub.asked == []


def test_earlier_download_serves_when_the_hub_cannot_be_reached(hub, caplog):
    hub.offline = ConnectionError("no route")
    write_folder(hub.cache)
    assert resolve_source("owner/name").path == hub.cache
    assert [kind for kind, *_ in hub.asked] == ["list", "look up"]
    assert "earlier download" in caplog.text
    (hub.cache / "model.safetensors").unlink()
    refused("owner/name", "only the configuration was downloaded before", "no weights; connect")
    refused("owner/name", "drop local_files_only once", local_files_only=True)


@pytest.mark.parametrize(
    ("kind", "word"),
    [("GatedRepoError", "gated"), ("RepositoryNotFoundError", "neither as a local path"),
     ("RevisionNotFoundError", "no revision 'v9'")],
)  # fmt: skip
def test_refusals_of_the_hub_are_explained(hub, monkeypatch, kind, word):
    error = type(kind, (Exception,), {})("HTTP 404")

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    refused("owner/name", word, revision="v9")
    assert hub.asked == []


def test_hub_ids_and_paths_look_different(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not looks_like_path("mlx-community/gemma-3-270m-4bit")
    assert as_hub_id("hf://owner/name") == "owner/name"
    assert as_hub_id("owner/name") == "owner/name"
    for text in ("demo", "./owner/name", "/owner/name", "hf://owner/name/a.gguf", tmp_path):
        assert as_hub_id(text) is None


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("given", ["", "  ", 5, b"tiny", "x" * 5000, "~nobody-of-this-name/x"])
def test_what_is_no_path_is_refused_in_one_sentence(given):
    assert len(refused(given)) < 400
    with pytest.raises(SourceError):
        plan(given)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a folder nor a regular file")


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(_self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    refused(tmp_path, f"{tmp_path} cannot be read: Permission denied")


def test_gguf_content_decides_where_the_ending_is_missing(tmp_path):
    (tmp_path / "x").write_bytes(gguf_bytes({}, {}))
    assert local_source(tmp_path / "x").kind == "gguf"

"""Of a Hub id, plans and inspections fetch what is small, and headers."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from golden.fixtures import load_golden
from loading.files import llama_weights, two_shards, write_folder, write_gguf
from loading.hub_files import serve_hub
from loading.qwen4_files import published, wrapped

from turbospark.checkpoints import inspect
from turbospark.errors import CheckpointError, SourceError
from turbospark.loading import tables
from turbospark.loading.plan import plan

LLAMA_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return serve_hub(tmp_path, monkeypatch)


def fetched_weights(hub):
    return [name for name in hub.fetched() if name.endswith((".safetensors", ".gguf"))]


def test_inspection_of_a_hub_id_is_that_of_its_folder_without_its_weights(hub):
    write_folder(hub.folder, shards=two_shards(llama_weights()))
    found, local = inspect("owner/name").as_dict(), inspect(hub.folder).as_dict()
    assert found.pop("path") == "owner/name"
    assert local.pop("path") == str(hub.folder)
    assert found == local
    assert found["refused"] == ""
    assert fetched_weights(hub) == []
    assert "tokenizer.json" in hub.fetched()
    assert sorted(name for kind, _, name in hub.asked if kind == "header") == LLAMA_SHARDS


def test_one_file_of_any_name_is_looked_up(hub):
    write_folder(hub.folder)
    (hub.folder / "model.safetensors").rename(hub.folder / "weights.safetensors")
    assert len(inspect("hf://owner/name").tensors) == 20
    assert fetched_weights(hub) == []


def test_weights_that_were_downloaded_before_are_read_here(hub):
    write_folder(hub.folder)
    shutil.copytree(hub.folder, hub.cache)
    assert len(inspect("owner/name").tensors) == 20
    assert "header" not in [kind for kind, *_ in hub.asked]
    hub.offline = ConnectionError("no route")
    assert len(inspect("owner/name").tensors) == 20
    assert plan("owner/name", 50).num_tensors == 20


def test_a_repository_of_one_gguf_file_is_downloaded(hub):
    write_gguf(hub.folder / "model-Q8_0.gguf")
    assert inspect("owner/name").kind == "gguf"
    assert fetched_weights(hub) == ["model-Q8_0.gguf"]


def refused(kind, *words):
    for look in (inspect, plan):
        with pytest.raises(kind) as caught:
            look("owner/name")
        for word in words:
            assert word in str(caught.value)


def test_what_keeps_headers_away_is_one_sentence(hub, monkeypatch):
    write_folder(hub.folder)
    hub.offline = ConnectionError("no route")
    refused(SourceError, "owner/name", "the Hub cannot be reached", "no earlier download; connect")
    hub.offline = None

    def fail(repo, filename, revision=None):
        raise ConnectionError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "parse_safetensors_file_metadata", fail)
        refused(SourceError, "owner/name", "cut")
    (hub.folder / "config.json").unlink()
    shutil.rmtree(hub.cache)
    refused(SourceError, "owner/name", "no config.json")


def test_index_and_headers_on_the_hub_are_held_against_each_other(hub):
    write_folder(hub.folder, shards=two_shards(llama_weights()))
    index = hub.folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    name = next(iter(said["weight_map"]))
    said["weight_map"][name.replace("model", "modem")] = said["weight_map"].pop(name)
    index.write_text(json.dumps(said))
    refused(CheckpointError, "modem", LLAMA_SHARDS[0])
    (hub.folder / LLAMA_SHARDS[1]).unlink()
    refused(CheckpointError, "1 of 2 weight files", "owner/name", LLAMA_SHARDS[1])


def test_a_type_that_is_not_implemented_is_named_with_its_file(hub):
    write_folder(hub.folder)
    path = hub.folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F32"', b'"F99"', 1))
    refused(CheckpointError, str(Path("owner/name/model.safetensors")), "F99")


def test_tables_that_stay_in_files_on_the_hub_are_held_against_the_model(hub, monkeypatch):
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    golden = load_golden("qwen4_exp")
    tensors = published(golden)
    write_folder(hub.folder, tensors, wrapped(golden))
    found, local = plan("owner/name", 50), plan(hub.folder, 50)
    assert found.left_bytes == local.left_bytes > 0
    assert found.weight_bytes == local.weight_bytes
    lost = next(name for name in tensors if name.endswith("shard_2.weight"))
    write_folder(hub.folder, {k: v for k, v in tensors.items() if k != lost}, wrapped(golden))
    with pytest.raises(CheckpointError, match=r"part 2 of the table.*owner/name/model"):
        plan("owner/name", 50)

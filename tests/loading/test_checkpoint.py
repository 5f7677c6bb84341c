"""Which weight files count, and what is said when one of them is missing or wrong."""

import json

import numpy as np
import pytest
from loading.files import llama_weights, safetensors_bytes, two_shards, write_folder

from turbospark.errors import CheckpointError
from turbospark.loading.checkpoint import INDEX, load_arrays, read_checkpoint, some

SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def weights():
    return llama_weights()


@pytest.fixture
def sharded(tmp_path, weights):
    return write_folder(tmp_path / "model", weights, shards=two_shards(weights))


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_single_and_sharded_folders_give_the_same_tensors(tmp_path, weights, sharded):
    single = write_folder(tmp_path / "single", weights)
    for folder in (single, sharded):
        arrays = load_arrays(read_checkpoint(folder))
        assert set(arrays) == set(weights)
        for name, expected in weights.items():
            assert np.array_equal(np.asarray(arrays[name]), expected)


def test_missing_shard_is_named_with_the_count_and_how_to_resume(sharded):
    (sharded / SECOND).unlink()
    refused(sharded, "1 of 2", SECOND, str(sharded), "hf download")


def test_zero_byte_shard_is_named(sharded):
    (sharded / SECOND).write_bytes(b"")
    refused(sharded, SECOND, "0 bytes")


def test_truncated_shard_is_named(sharded):
    raw = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(raw[:-100])
    refused(sharded, SECOND, f"{len(raw) - 100} bytes of {len(raw)}", "download")


def test_stray_file_beside_the_index_changes_nothing(sharded, weights):
    strange = {name: np.full_like(array, np.nan) for name, array in weights.items()}
    for name in ("model.safetensors", "adapter.safetensors", "model-00003-of-00002.safetensors"):
        (sharded / name).write_bytes(safetensors_bytes(strange))
    arrays = load_arrays(read_checkpoint(sharded))
    assert all(np.array_equal(np.asarray(arrays[name]), weights[name]) for name in weights)


def test_tensor_that_the_index_lists_but_no_shard_holds_is_named(sharded):
    edit_index(sharded, lambda names: names.update({"model.extra.weight": SECOND}))
    refused(sharded, "model.extra.weight", SECOND, INDEX)


def test_tensor_that_the_index_does_not_list_is_named(sharded):
    edit_index(sharded, lambda names: names.pop("model.embed_tokens.weight"))
    refused(sharded, "model.embed_tokens.weight", "model-00001", INDEX)


def test_tensor_in_another_shard_than_the_index_says_is_named(sharded):
    edit_index(sharded, lambda names: names.update({"model.norm.weight": SECOND}))
    refused(sharded, "model.norm.weight", SECOND, "model-00001")


def test_tensor_in_two_shards_is_named(sharded, weights):
    names = two_shards(weights)[SECOND]
    doubled = {name: weights[name] for name in [*names, "model.norm.weight"]}
    (sharded / SECOND).write_bytes(safetensors_bytes(doubled))
    refused(sharded, "model.norm.weight", SECOND)


def test_tensor_in_two_shards_without_an_index_is_named(sharded, weights):
    (sharded / INDEX).unlink()
    names = two_shards(weights)[SECOND]
    doubled = {name: weights[name] for name in [*names, "model.norm.weight"]}
    (sharded / SECOND).write_bytes(safetensors_bytes(doubled))
    refused(sharded, "'model.norm.weight' is in", SECOND, "model-00001")


def test_index_cannot_reach_outside_the_folder(tmp_path, sharded, weights):
    outside = write_folder(tmp_path / "other", weights) / "model.safetensors"
    for file in ("../other/model.safetensors", str(outside)):
        weight_map = json.dumps({"weight_map": dict.fromkeys(weights, file)})
        (sharded / INDEX).write_text(weight_map)
        refused(sharded, INDEX, file, "not a safetensors file of the folder")


@pytest.mark.parametrize(
    "index",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 5}}',
     '{"weight_map": {"a": "../other/model.safetensors"}}', '{"weight_map": {"a": "model.bin"}}'],
)  # fmt: skip
def test_unusable_index_is_named(sharded, index):
    (sharded / INDEX).write_text(index)
    refused(sharded, INDEX)


def test_shards_without_an_index_must_be_complete(sharded, weights):
    (sharded / INDEX).unlink()
    assert set(read_checkpoint(sharded)) == set(weights)
    (sharded / "model-00001-of-00002.safetensors").unlink()
    refused(sharded, "1 of 2", "model-00001-of-00002.safetensors")


def test_a_single_file_of_another_name_counts_and_two_do_not(tmp_path, weights):
    folder = write_folder(tmp_path / "model", weights)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert set(read_checkpoint(folder)) == set(weights)
    (folder / "more.safetensors").write_bytes(safetensors_bytes({}))
    refused(folder, "2 safetensors files", "more.safetensors")


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/ab12")
    refused(folder, "model.safetensors is a link to ../blobs/ab12, which is not there")


def test_pickles_are_not_opened(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    refused(folder, "no safetensors weights")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    refused(folder, "pytorch_model.bin", "pickled")


def test_messages_name_only_the_first_few():
    assert some(["a", "b"]) == "'a', 'b'"
    assert some(list("abcde")) == "'a', 'b', 'c' and 2 more"

"""Whole qwen4_exp checkpoints: as published, as converted, with heads, and damaged."""

import re

import mlx.core as mx
import numpy as np
import pytest
from golden.drafter_fixtures import load_drafter_golden
from golden.fixtures import load_golden
from loading.drafter_files import converted as with_baked_norms
from loading.drafter_files import write_head, write_qwen
from loading.files import write_folder
from loading.qwen4_files import converted, logits, numbers, published, wrapped

import turbospark
from families.qwen4_exp import build
from turbospark.errors import CheckpointError, ConfigError
from turbospark.loading import tables
from turbospark.loading.build import load_model
from turbospark.loading.drafters import load_drafter
from turbospark.loading.inspect import inspect
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

HEAD = "qwen4_exp_mtp"
REFERENCE = KernelPolicy(kernels="reference")


@pytest.fixture
def golden():
    return load_golden("qwen4_exp")


def test_the_original_release_loads(golden, tmp_path):
    folder = write_folder(tmp_path / "a", published(golden) | numbers(golden), wrapped(golden))
    loaded = load_model(folder, policy=REFERENCE)
    assert golden.difference(logits(loaded, golden), "full") < golden.tolerance


@pytest.mark.parametrize("baked", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_conversion_loads_whether_or_not_its_norms_hold_one_more(
    golden, tmp_path, baked, sharded
):
    tensors, quantization = converted(golden, baked=baked, sharded=sharded)
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden, quantization=quantization))
    loaded = load_model(folder, policy=REFERENCE)
    assert golden.difference(logits(loaded, golden), "int4") < golden.tolerance
    layer = loaded.model.layers[1]
    assert layer.mlp.gate.value.bits == layer.mlp.shared_expert_gate.value.bits == 8
    assert layer.ngrams.ple_embedding.ngram_embedding.value.group_size == 32


def converted_with_tables(golden, folder, entry, bits=4):
    """A conversion whose tables lie in shards, and have one entry each, under the given prefix."""
    tensors, quantization = converted(golden, baked=True)
    said = {path: layout for path, layout in quantization.items() if "ngram" not in path}
    if entry is not None:
        for layer in (1, 4):
            path = f"{entry}layers.{layer}.ple.ple_embedding.ngram_embedding"
            said[path] = {"group_size": 32, "bits": bits}
    return write_folder(folder, tensors, wrapped(golden, quantization=said))


@pytest.mark.parametrize("entry", ["language_model.model.", "", None])
@pytest.mark.parametrize("left", [False, True])
def test_shards_of_a_table_have_the_layout_of_its_entry_or_of_its_width(
    golden, tmp_path, monkeypatch, entry, left
):
    if left:
        monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    folder = converted_with_tables(golden, tmp_path / "a", entry)
    loaded = load_model(folder, policy=REFERENCE)
    assert golden.difference(logits(loaded, golden), "int4") < golden.tolerance
    if entry is not None:
        assert inspect(folder).quantization["4 bits, groups of 32"] == 4


def test_an_entry_of_a_table_that_its_shards_contradict_is_refused(golden, tmp_path):
    folder = converted_with_tables(golden, tmp_path / "a", "", bits=8)
    with pytest.raises(
        CheckpointError, match=rf"^{folder}/config\.json says 8 bits.* for '.*embedding\.shards\.0'"
    ):
        load_model(folder, policy=REFERENCE)


@pytest.mark.parametrize(("says", "factor"), [(False, 1), (True, 0)])
def test_norms_that_are_said_to_hold_one_more_are_left_alone(golden, says, factor):
    model = build(golden.config | {"preshifted_norm_weights": says})
    name = "model.layers.0.mlp_hyper_connection.hc_norm.weight"
    assert model.sanitize({name: mx.zeros((7,))})[name][0].item() == factor


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight",
         "part 2 of the table model.layers.1.ple.ple_embedding.ngram_embedding is missing"),
        ("model.language_model.layers.2.self_attn.indexer.k_layernorm.weight",
         "layers.2.self_attn.indexer.k_layernorm.weight"),
        ("model.language_model.hyper_connection_mixer.hc_norm.weight",
         "hyper_connection_mixer.hc_norm.weight"),
        ("model.language_model.layers.4.ple.norm_conv.weight", "layers.4.ple.norm_conv.weight"),
    ],
)  # fmt: skip
def test_a_missing_tensor_is_named(golden, tmp_path, monkeypatch, lost, says, left):
    if left:
        monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    tensors = published(golden)
    del tensors[lost]
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden))
    with pytest.raises(CheckpointError, match=re.escape(says)) as raised:
        load_model(folder, policy=REFERENCE)
    assert str(folder / "model.safetensors") in str(raised.value)


@pytest.mark.parametrize("left", [False, True])
def test_a_part_that_is_there_twice_is_refused(golden, tmp_path, monkeypatch, left):
    if left:
        monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    tensors = published(golden)
    stem = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
    tensors[f"{stem}.shards.2.weight"] = tensors[f"{stem}.shard_2.weight"] * 0
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden))
    with pytest.raises(CheckpointError, match=r"part 2 of the table .* under another name"):
        load_model(folder, policy=REFERENCE)


@pytest.mark.parametrize("left", [False, True])
def test_scales_that_are_no_floats_are_refused(golden, tmp_path, monkeypatch, left):
    if left:
        monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    tensors, quantization = converted(golden, baked=True)
    for name in tensors:
        if "ngram_embedding" in name and not name.endswith(".weight"):
            tensors[name] = np.ones(tensors[name].shape, np.int64)
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden, quantization=quantization))
    with pytest.raises(CheckpointError, match=r"(scales|biases).* mlx\.core\.int64"):
        load_model(folder, policy=REFERENCE)


def test_an_unknown_tensor_is_named(golden, tmp_path):
    tensors = published(golden) | {"model.language_model.layers.0.mystery.weight": np.zeros((2, 2))}
    tensors = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mystery\.weight"):
        load_model(folder, policy=REFERENCE)


def test_other_multipliers_than_the_configuration_makes_are_refused(golden, tmp_path):
    own = numbers(golden)
    name = next(name for name in own if name.endswith("layer_multipliers"))
    own[name] = own[name] + 2
    folder = write_folder(tmp_path / "a", published(golden) | own, wrapped(golden))
    with pytest.raises(CheckpointError, match="layer_multipliers holds"):
        load_model(folder, policy=REFERENCE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ple_layer_ids": [0]}, "layers are numbered 1 to 6"),
        ({"ple_layer_ids": [7]}, "layers are numbered 1 to 6"),
        ({"ple_layer_ids": [3]}, "no linear_attention layer"),
        ({"indexer_budget": 7}, "not a multiple of indexer_compress_ratio"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads=2 is not implemented"),
        ({"indexer_head_dim": 12}, "that rotate"),
        ({"ple_embed_dim": 130}, "does not divide into 4 heads"),
        ({"eos_token_id": []}, "eos_token_id names no token"),
        ({"output_gate_type": "tanh"}, "output_gate_type='tanh'"),
        ({"layer_types": ["sliding_attention"] * 6}, r"layer_types[0]='sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 5}, "lists 5 layers"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(golden, tmp_path, change, says):
    folder = write_folder(tmp_path / "a", published(golden), golden.config | change)
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_model(folder, policy=REFERENCE)


def first_row(drafter):
    """How far a head's rows are from torch's, given the trunk's streams."""
    arrays = load_drafter_golden(HEAD).arrays
    following = np.append(arrays["ids"][1:], arrays["anchor"]).astype(np.int32)
    caches = drafter.head.make_caches(96)
    y = drafter.head(mx.array(following), mx.array(arrays["hidden"]), caches, Phase.PREFILL)
    return np.abs(np.array(y) - arrays["batch"]).max()


@pytest.mark.parametrize("change", [lambda _, value: value, with_baked_norms])
def test_the_head_beside_a_trunk_is_read(tmp_path, change):
    target = load_model(write_qwen(tmp_path / "a", HEAD, change=change), policy=REFERENCE)
    assert first_row(load_drafter("mtp", target)) < 2e-5


@pytest.mark.parametrize("prefix", ["mtp.", ""])
@pytest.mark.parametrize("baked", [False, True])
def test_a_head_in_a_folder_of_its_own_is_read_whatever_its_norms_hold(tmp_path, prefix, baked):
    target = load_model(write_qwen(tmp_path / "a", HEAD), policy=REFERENCE)
    folder = write_head(tmp_path / "b", prefix=prefix, baked=baked, name=HEAD)
    assert first_row(load_drafter(folder, target)) < 2e-5


@pytest.mark.parametrize(
    "lost", ["mtp.fc_hidden.weight", "mtp.layers.0.self_attn.indexer.q_layernorm.weight"]
)
def test_a_missing_tensor_of_a_head_is_named(tmp_path, lost):
    def change(name, value):
        return None if name == lost else value

    target = load_model(write_qwen(tmp_path / "a", HEAD, change=change), policy=REFERENCE)
    with pytest.raises(CheckpointError, match=re.escape(lost.removeprefix("mtp."))):
        load_drafter("mtp", target)


def test_what_a_checkpoint_is_made_of_is_said_of_its_layers(golden, tmp_path):
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    layers = turbospark.inspect(folder).structure.layers
    assert [layer.count for layer in layers] == [2, 2, 2]
    assert all(layer.mlp.startswith("3 of 8 experts of 64") for layer in layers)
    assert [layer.mixer.split(",")[0] for layer in layers] == [
        "delta net", "delta net", "sparse attention",
    ]  # fmt: skip
    assert layers[1].mixer.endswith("after n-grams")

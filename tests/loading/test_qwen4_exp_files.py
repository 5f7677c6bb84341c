"""Whole qwen4_exp checkpoints: as published, as converted, with tables in memory and in files."""

import fcntl
import gc
import os
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from golden.drafter_fixtures import load_drafter_golden
from golden.fixtures import feed, int4_weights, load_golden
from loading.drafter_files import converted as with_baked_norms
from loading.drafter_files import write_head, write_qwen
from loading.files import bfloat16, write_folder
from mlx.utils import tree_flatten

import turbospark
from families.qwen4_exp import build
from turbospark.errors import CheckpointError, ConfigError
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading import tables
from turbospark.loading.build import load_model
from turbospark.loading.checkpoint import read_checkpoint
from turbospark.loading.convert import convert
from turbospark.loading.drafters import load_drafter
from turbospark.loading.plan import plan
from turbospark.nn.weights import split_rows
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel
from turbospark.settings import KernelPolicy

HEAD = "qwen4_exp_mtp"
REFERENCE = KernelPolicy(kernels="reference")
TABLE = re.compile(r"(.+\.ple_embedding)\.ngram_embedding\.weight")
PARTS = 4


@pytest.fixture
def golden():
    return load_golden("qwen4_exp")


@pytest.fixture
def in_files(monkeypatch):
    """Every table stays in its files."""
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)


def published(golden):
    """Names and parts of the original release."""
    found = {}
    for name, value in golden.weights.items():
        name = name.replace("model.", "model.language_model.", 1)
        table = TABLE.fullmatch(name)
        if table:
            shards = np.array_split(value, PARTS)
            found |= {
                f"{table[1]}.ngram_embedding.shard_{i}.weight": x for i, x in enumerate(shards)
            }
        else:
            found[name] = value
    found["model.visual.merger.norm.weight"] = np.zeros(3, np.float32)
    found["mtp.fc_hidden.weight"] = np.zeros((2, 2), np.float32)
    return found


def numbers(golden):
    """The whole numbers that a release keeps beside its tables."""
    found = {}
    for i, layer in enumerate(build(golden.config).layers):
        if layer.ngrams is not None:
            hashing = layer.ngrams.ple_embedding.hashing
            at = f"model.language_model.layers.{i}.ple.ple_embedding."
            found[at + "layer_multipliers"] = np.array(hashing.multipliers, np.int64)
            found[at + "ngram_heads_vocab_sizes"] = np.array(hashing.primes, np.int64)
            found[at + "ngram_heads_offsets"] = np.array(hashing.offsets, np.int64)
    return found


def wrapped(golden, **extra):
    text = golden.config | {"model_type": "qwen4_exp_text"}
    return {
        "model_type": "qwen4_exp",
        "tie_word_embeddings": golden.config["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"depth": 2},
    } | extra


def converted(golden, *, baked, group_size=32, sharded=True):
    """Tensors and `quantization` of an MLX conversion."""
    tensors, quantization = {}, {"group_size": 64, "bits": 4, "mode": "affine"}
    for own, weight in int4_weights(golden).items():
        for name, value in mlx_names(own, weight, baked, sharded).items():
            if not isinstance(value, QuantizedWeight):
                tensors[name] = np.array(value)
                continue
            path = name.removesuffix(".weight")
            parts = {"weight": value.codes, "scales": value.scales, "biases": value.biases}
            tensors |= {f"{path}.{part}": np.array(array) for part, array in parts.items()}
            if (value.bits, value.group_size) != (4, 64):
                quantization[path] = {"group_size": value.group_size, "bits": value.bits}
    return tensors, quantization


def mlx_names(name, value, baked, sharded):
    name = f"language_model.{name}"
    table = TABLE.fullmatch(name)
    if table and sharded:
        parts = split_rows(name, value, 2)
        return {f"{table[1]}.ngram_embedding.shards.{i}.weight": x for i, x in enumerate(parts)}
    if name.endswith("experts.gate_up_proj.weight"):
        stem = name.replace("experts.gate_up_proj.weight", "switch_mlp")
        gate, up = split_rows(name, value)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if name.endswith("conv1d.weight"):
        value = value.swapaxes(1, 2)
    elif baked and "norm" in name and len(value.shape) == 1 and "linear_attn" not in name:
        value = value + 1
    return {name.replace("experts.down_proj", "switch_mlp.down_proj"): value}


def logits(loaded, golden, count=40, **how):
    return feed(loaded.model, golden.tokens[:count], [count], **how)


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


@pytest.mark.parametrize(("says", "factor"), [(False, 1), (True, 0)])
def test_norms_that_are_said_to_hold_one_more_are_left_alone(golden, says, factor):
    model = build(golden.config | {"preshifted_norm_weights": says})
    name = "model.layers.0.mlp_hyper_connection.hc_norm.weight"
    assert model.sanitize({name: mx.zeros((7,))})[name][0].item() == factor


@pytest.mark.parametrize("kind", [None, "int4", "int4-g32"])
def test_a_table_in_its_files_gives_the_same_bits(golden, tmp_path, monkeypatch, kind):
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    if kind is not None:
        convert(folder, tmp_path / "b", quantize=kind, text=None)
        folder = tmp_path / "b"
    held = load_model(folder, policy=REFERENCE)
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    left = load_model(folder, policy=REFERENCE)
    assert left.model.layers[1].ngrams.ple_embedding.reader is not None
    for sizes in ([40], [7] * 5 + [5]):
        runs = [feed(each.model, golden.tokens, sizes) for each in (held, left)]
        assert np.array_equal(*runs)
    steps = [feed(each.model, golden.tokens, [1] * 40, phase=Phase.DECODE) for each in (held, left)]
    assert np.array_equal(*steps)


def test_a_table_in_bfloat16_gives_the_same_bits_from_its_files(golden, tmp_path, monkeypatch):
    tensors = {
        name: bfloat16(value) if "ngram_embedding" in name else value
        for name, value in published(golden).items()
    }
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden))
    held = load_model(folder, policy=REFERENCE)
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    left = load_model(folder, policy=REFERENCE)
    assert np.array_equal(*(logits(each, golden) for each in (held, left)))


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_only_the_rows_of_the_tokens_are_read(golden, tmp_path, in_files, monkeypatch, system):
    if system == "linux" and not hasattr(os, "posix_fadvise"):
        pytest.skip("this system is told of reads in another way")
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    loaded = load_model(folder, policy=REFERENCE)
    read, advised = [], []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, into, at: (read.append(at), preadv(file, into, at))[1]
    )

    def advice(file, *given):
        at = given[0] if system == "linux" else struct.unpack("@qi4x", given[1])[0]
        advised.append((len(read), at))

    if system == "linux":
        monkeypatch.setattr(os, "posix_fadvise", advice)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(fcntl, "fcntl", advice)
    caches = loaded.model.make_caches(64, 5)
    feed(loaded.model, golden.tokens[:1], [1], phase=Phase.DECODE, caches=caches)
    assert len(read) == 2 * 4  # two layers of four heads
    assert {at for _, at in advised} == set(read)
    assert {before for before, _ in advised} == {0}  # all are asked for before one is read
    feed(loaded.model, golden.tokens[1:4], [3], caches=caches)
    assert len(read) <= 4 * 2 * 4


def test_a_table_in_its_files_is_no_weight_of_the_plan(golden, tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    table = sum(value.nbytes for name, value in published(golden).items() if "ngram_emb" in name)
    held = plan(folder, context=64)
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    left = plan(folder, context=64)
    assert (held.left_bytes, left.left_bytes) == (0, table)
    assert held.weight_bytes - left.weight_bytes == table
    # Of each of two tables in memory a token needs four rows of 32 numbers.
    assert 0 < held.active_bytes - left.active_bytes == 2 * 4 * 32 * 4
    assert held.file_bytes == left.file_bytes
    assert "stay and are read row by row" in repr(left)
    loaded = load_model(folder, policy=REFERENCE)
    sizes = [value.nbytes for _, value in tree_flatten(loaded.model.parameters())]
    assert sum(sizes) == left.weight_bytes


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


def test_a_table_of_other_sizes_is_named_with_its_file(golden, tmp_path, in_files):
    tensors = published(golden)
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight"
    tensors[name] = tensors[name][:-1]
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*ngram_embedding.*is needed"):
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


def test_a_row_that_was_cut_off_after_loading_is_an_error(golden, tmp_path, in_files):
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    loaded = load_model(folder, policy=REFERENCE)
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match="it was cut after it was loaded"):
        logits(loaded, golden)


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


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_text_from_tables_in_files_is_that_from_tables_in_memory(tmp_path, monkeypatch, draft):
    folder = write_qwen(tmp_path / "a", HEAD)
    held = turbospark.load(folder, draft="off")
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    left = turbospark.load(folder, draft=draft)
    given = {"max_tokens": 30} | ({"draft_block": 3} if draft == "auto" else {})
    result = left.generate("Hello there, what is this?", **given)
    assert str(result) == str(held.generate("Hello there, what is this?", max_tokens=30))
    assert (result.drafted > 0) == (draft == "auto")


def test_a_conversation_over_tables_in_files_goes_on_after_it_was_saved(tmp_path, in_files):
    engine = turbospark.load(write_qwen(tmp_path / "a", HEAD), draft="auto")
    one = engine.session("one")
    one.send("Hello there", max_tokens=12, draft_block=2)
    one.save(tmp_path / "saved")
    again = engine.load_session(tmp_path / "saved", name="two")
    texts = [str(each.send(" more", max_tokens=9, draft_block=2)) for each in (one, again)]
    assert texts[0] == texts[1]
    one.close()
    again.close()


def test_a_compiled_step_is_given_the_rows_that_no_graph_can_read(
    golden, tmp_path, in_files, monkeypatch
):
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    model = load_model(folder, policy=REFERENCE).model
    steps = CompiledModel(model)
    trace = steps._trace

    def look_up(*_):
        raise AssertionError("files were read inside a graph")

    def traced(*given):
        with monkeypatch.context() as inside:
            inside.setattr(type(model), "look_up", look_up)
            return trace(*given)

    monkeypatch.setattr(steps, "_trace", traced)
    ours, theirs = (model.make_caches(64, 5) for _ in range(2))
    for caches in (ours, theirs):
        feed(model, golden.tokens[:20], [20], caches=caches)
    mx.disable_compile()
    try:
        got = feed(steps, golden.tokens[20:], [1] * 16 + [4], phase=Phase.DECODE, caches=ours)
    finally:
        mx.enable_compile()
    wanted = feed(model, golden.tokens[20:], [20], phase=Phase.DECODE, caches=theirs)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert steps.traces == 17  # uncompiled, each pass is one


def test_a_conversation_over_another_table_is_refused(tmp_path, in_files):
    engine = turbospark.load(write_qwen(tmp_path / "a", HEAD), draft="off")
    session = engine.session("one")
    session.send("Hello there", max_tokens=3)
    session.save(tmp_path / "saved")
    session.close()

    def change(name, value):
        return value + 1 if "ngram_embedding" in name else value

    other = turbospark.load(write_qwen(tmp_path / "b", HEAD, change=change), draft="off")
    with pytest.raises(CheckpointError, match="weights"):
        other.load_session(tmp_path / "saved")


def test_what_a_checkpoint_is_made_of_is_said_of_its_layers(golden, tmp_path):
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    layers = turbospark.inspect(folder).structure.layers
    assert [layer.count for layer in layers] == [2, 2, 2]
    assert all(layer.mlp.startswith("3 of 8 experts of 64") for layer in layers)
    assert [layer.mixer.split(",")[0] for layer in layers] == [
        "delta net", "delta net", "sparse attention",
    ]  # fmt: skip
    assert layers[1].mixer.endswith("after n-grams")


def test_converting_a_table_that_stays_in_its_files_gives_the_same_model(
    golden, tmp_path, monkeypatch
):
    """It is written part by part, in groups of 32, and never joined."""
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    convert(folder, tmp_path / "b", quantize="int4", text=None)
    with monkeypatch.context() as inside:
        inside.setattr(tables, "RESIDENT_BYTES", 0)
        convert(folder, tmp_path / "c", quantize="int4", text=None)
    names = [set(read_checkpoint(tmp_path / name)) for name in "bc"]
    assert sum("ngram_embedding.shard_" in name for name in names[1]) == 2 * PARTS * 3
    assert not any("shard_" in name for name in names[0])
    runs = [logits(load_model(tmp_path / name, policy=REFERENCE), golden) for name in "bc"]
    assert np.array_equal(*runs)
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)
    left = load_model(tmp_path / "c", policy=REFERENCE)
    assert np.array_equal(logits(left, golden), runs[0])


def test_files_of_a_table_are_closed_with_the_model(golden, tmp_path, in_files):
    loaded = load_model(
        write_folder(tmp_path / "a", published(golden), wrapped(golden)), policy=REFERENCE
    )
    reader = loaded.model.layers[1].ngrams.ple_embedding.reader
    (descriptor,) = reader._files.values()
    assert os.fstat(descriptor).st_size
    del loaded, reader
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_table_is_read_from_several_threads(golden, tmp_path, in_files):
    loaded = load_model(
        write_folder(tmp_path / "a", published(golden), wrapped(golden)), policy=REFERENCE
    )
    reader = loaded.model.layers[1].ngrams.ple_embedding.reader
    table = golden.weights["model.layers.1.ple.ple_embedding.ngram_embedding.weight"]

    def right(seed):
        rows = np.random.default_rng(seed).integers(0, len(table), size=50)
        return np.array_equal(np.array(reader.read(rows)), table[rows])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, range(40)))

"""Tables of n-grams that stay in their files give what tables in memory give."""

import fcntl
import gc
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import feed, load_golden
from loading.drafter_files import write_qwen
from loading.files import bfloat16, write_folder
from loading.qwen4_files import PARTS, logits, published, wrapped
from mlx.utils import tree_flatten

import turbospark
from turbospark.errors import CheckpointError
from turbospark.loading import tables
from turbospark.loading.build import load_model
from turbospark.loading.checkpoint import read_checkpoint
from turbospark.loading.convert import convert
from turbospark.loading.plan import plan
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel
from turbospark.settings import KernelPolicy

HEAD = "qwen4_exp_mtp"
REFERENCE = KernelPolicy(kernels="reference")


@pytest.fixture
def golden():
    return load_golden("qwen4_exp")


@pytest.fixture
def in_files(monkeypatch):
    """Every table stays in its files."""
    monkeypatch.setattr(tables, "RESIDENT_BYTES", 0)


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


def test_a_table_of_other_sizes_is_named_with_its_file(golden, tmp_path, in_files):
    tensors = published(golden)
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight"
    tensors[name] = tensors[name][:-1]
    folder = write_folder(tmp_path / "a", tensors, wrapped(golden))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*ngram_embedding.*is needed"):
        load_model(folder, policy=REFERENCE)
    with pytest.raises(CheckpointError, match=r"a table .* in files where .* is needed"):
        plan(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert "is needed" in turbospark.inspect(folder).refused


def test_a_row_that_was_cut_off_after_loading_is_an_error(golden, tmp_path, in_files):
    folder = write_folder(tmp_path / "a", published(golden), wrapped(golden))
    loaded = load_model(folder, policy=REFERENCE)
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match="it was cut after it was loaded"):
        logits(loaded, golden)


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

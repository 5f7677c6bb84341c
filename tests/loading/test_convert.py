"""Conversion writes a folder that loads, whole or not at all, and says what it cost."""

import json
import math
import re

import mlx.core as mx
import numpy as np
import pytest
from loading.files import (
    LLAMA,
    VOCAB,
    gguf_metadata,
    gguf_tensors,
    llama_weights,
    q8_0,
    two_shards,
    write_folder,
    write_gguf,
)

from turbospark.errors import CheckpointError, OptionError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading import convert as conversions
from turbospark.loading.build import load_model
from turbospark.loading.checkpoint import INDEX, load_arrays, read_checkpoint
from turbospark.loading.convert import convert, quantization_entries, with_biases
from turbospark.loading.install import parameter_slots
from turbospark.loading.losses import loss
from turbospark.loading.perplexity import perplexity
from turbospark.loading.quantize import Quantization, is_careful, parse_quantize, quantization_for
from turbospark.loading.shards import split_names, write_shards
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy
from turbospark.testing import write_tiny_checkpoint

TEXT = "a river of bytes, and a bridge"
REFERENCE = KernelPolicy(kernels="reference")


@pytest.fixture(autouse=True)
def _reference_kernels(monkeypatch):
    monkeypatch.setenv("TURBOSPARK_KERNELS", "reference")


def logits(path, tokens=(1, 77, 5, 200, 31)):
    loaded = load_model(path, policy=REFERENCE)
    caches = loaded.model.make_caches(50, 3)
    output = loaded.model(mx.array(tokens), caches, phase=Phase.PREFILL, logits="all")
    return np.asarray(output.logits)


def test_a_model_that_nothing_of_would_be_quantized_is_refused(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny", hidden_size=48, intermediate_size=80)
    said = r"no matrix of .* divide into groups of 64 .*48, 80, 96"
    with pytest.raises(OptionError, match=said):
        convert(folder, tmp_path / "out", text=None)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    with pytest.raises(OptionError, match=said):
        load_model(folder, policy=REFERENCE, quantize="int4")
    slots = parameter_slots(load_model(folder, policy=REFERENCE, quantize="int4-g32").model)
    quantized = [
        name
        for name, slot in slots.items()
        if slot.is_matrix and isinstance(slot.module.value, QuantizedWeight)
    ]
    assert len(quantized) == 3
    assert all("o_proj" in name for name in quantized)


def test_float_folder_becomes_what_quantizing_at_load_gives(tmp_path):
    folder = write_folder(tmp_path / "hf")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    done = convert(folder, tmp_path / "out", quantize="int4-g32", text=TEXT)
    loaded = load_model(folder, policy=REFERENCE, quantize="int4-g32")
    caches = loaded.model.make_caches(50, 3)
    tokens = mx.array([1, 77, 5, 200, 31])
    expected = loaded.model(tokens, caches, phase=Phase.PREFILL, logits="all").logits
    assert np.array_equal(logits(tmp_path / "out"), np.asarray(expected))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"bits": 4, "group_size": 32, "mode": "affine"}
    assert {key: config[key] for key in LLAMA} == LLAMA
    assert load_model(tmp_path / "out", policy=REFERENCE).stop_ids == {2, 9}
    assert done.target_bytes < 0.3 * done.source_bytes
    assert done.perplexity_before > 1
    assert done.perplexity_after != done.perplexity_before
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_int4_is_the_default_for_float_weights(tmp_path):
    done = convert(write_folder(tmp_path / "hf"), tmp_path / "out", text=None)
    assert {(item.bits, item.group_size) for item in done.losses} == {(4, 64)}
    assert done.perplexity_before is None
    assert done.perplexity_after is None


def test_gguf_keeps_its_codes_and_its_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=q8_0))
    done = convert(path, tmp_path / "out", text=TEXT)
    assert done.losses == ()
    assert done.perplexity_after == pytest.approx(done.perplexity_before, rel=1e-5)
    before = load_model(path, policy=REFERENCE)
    after = load_model(tmp_path / "out", policy=REFERENCE)
    for text in ("ab a", " a  b", "čau 日本語", "</s>a"):
        assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
    assert after.stop_ids == before.stop_ids == {2}
    slots = parameter_slots(after.model)
    name = "model.layers.1.self_attn.q_proj.weight"
    weight = slots[name].module.value
    assert isinstance(weight, QuantizedWeight)
    assert np.array_equal(np.asarray(dequantize_reference(weight)), llama_weights()[name])


def test_groups_of_16_become_groups_that_mlx_has(tmp_path):
    draw = np.random.default_rng(2)

    def q6_k(name, matrix):
        if "token_embd" not in name:
            return q8_0(name, matrix)
        raw = draw.integers(0, 256, (matrix.size // 256, 210), dtype=np.uint8)
        raw[:, 208:210] = np.full((len(raw), 1), 2**-9, np.float16).view(np.uint8)
        return 14, raw.tobytes()

    config = {
        "llama.embedding_length": 256, "llama.feed_forward_length": 160,
        "llama.attention.head_count": 3,
    }  # fmt: skip
    weights = {
        name: np.tile(array, 4) if array.shape[-1] == 64 else array
        for name, array in llama_weights().items()
    }
    for name, array in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.tile(array, (4, 1))
    tensors = gguf_tensors(weights, q6_k)
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(**config), tensors)
    done = convert(path, tmp_path / "out", text=TEXT)
    assert [(item.name, item.bits, item.group_size) for item in done.losses] == [
        ("model.embed_tokens.weight", 8, 32)
    ]
    assert 0 < done.losses[0].relative < 0.01
    expected = logits(path)
    assert np.abs(logits(tmp_path / "out") - expected).max() < 0.01 * np.abs(expected).max()


def test_shards_are_written_with_an_index_and_load(tmp_path, monkeypatch):
    monkeypatch.setattr(conversions, "SHARD_BYTES", 40_000)
    folder = write_folder(tmp_path / "hf")
    convert(folder, tmp_path / "many", quantize="int8-g32", text=None)
    monkeypatch.setattr(conversions, "SHARD_BYTES", 1 << 30)
    convert(folder, tmp_path / "one", quantize="int8-g32", text=None)
    assert (tmp_path / "many" / INDEX).exists()
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert np.array_equal(logits(tmp_path / "many"), logits(tmp_path / "one"))


def test_wrapper_becomes_its_text_model(tmp_path):
    folder = write_folder(tmp_path / "hf")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "text_config": LLAMA, "dtype": "float32"})
    )
    convert(folder, tmp_path / "out", quantize="int8-g32", text=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "text_config" not in config
    assert config["hidden_size"] == 64


def test_failed_conversion_leaves_nothing(tmp_path):
    weights = llama_weights()
    del weights["model.norm.weight"]
    folder = write_folder(tmp_path / "hf", weights)
    with pytest.raises(CheckpointError):
        convert(folder, tmp_path / "out", text=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]

    def interrupt(done, total):
        raise KeyboardInterrupt

    folder = write_folder(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", text=None, progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "whole"]


def test_target_in_use_and_quantized_sources_are_refused(tmp_path):
    folder = write_folder(tmp_path / "hf")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    with pytest.raises(OptionError, match="used is there already"):
        convert(folder, tmp_path / "used")
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty", quantize="int4-g32", text=None)
    with pytest.raises(OptionError, match="quantized already"):
        convert(tmp_path / "empty", tmp_path / "again", text=None)
    path = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=q8_0))
    with pytest.raises(OptionError, match="quantized already"):
        convert(path, tmp_path / "again", quantize="int4", text=None)
    with pytest.raises(OptionError, match="int5-g7"):
        convert(folder, tmp_path / "again", quantize="int5-g7")


def test_what_will_be_refused_is_refused_before_the_model_is_read(tmp_path, monkeypatch):
    def read(*args, **options):
        raise AssertionError("the model was read")

    folder = write_folder(tmp_path / "hf")
    convert(folder, tmp_path / "done", quantize="int4-g32", text=None)
    monkeypatch.setattr("turbospark.loading.convert.load_model", read)
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "file" / "out"
    with pytest.raises(OptionError, match=re.escape(f"the folder {target} cannot be written: ")):
        convert(folder, target)
    with pytest.raises(OptionError, match="quantized already"):
        convert(tmp_path / "done", tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done", "file", "hf"]


def test_report_is_readable_and_json(tmp_path):
    calls = []
    done = convert(
        write_folder(tmp_path / "hf", shards=two_shards(llama_weights())), tmp_path / "out",
        quantize="int4-g32", text=TEXT, progress=lambda now, total: calls.append((now, total)),
    )  # fmt: skip
    shown = repr(done)
    for text in ("size", "perplexity", "lost most of 15", done.losses[0].name):
        assert text in shown
    assert json.loads(json.dumps(done.as_dict()))["target"] == str(tmp_path / "out")
    assert calls[-1] == (calls[-1][1],) * 2
    relative = [item.relative for item in done.losses]
    assert relative == sorted(relative, reverse=True)


def test_loss_is_the_relative_error_and_finds_the_bad_group():
    before = np.ones((3, 64), np.float32)
    before[1, 32:] = np.linspace(-4, 4, 32)
    codes, scales, biases = mx.quantize(mx.array(before), group_size=32, bits=2)
    weight = QuantizedWeight(codes, scales, biases, 2, 32)
    error = np.asarray(dequantize_reference(weight)) - before
    found = loss("w", mx.array(before), weight)
    expected = np.sqrt((error**2).sum() / (before**2).sum())
    assert found.relative == pytest.approx(expected, rel=1e-5)
    bad = np.sqrt((error[1, 32:] ** 2).sum() / (before[1, 32:] ** 2).sum())
    assert found.worst_group == pytest.approx(bad, rel=1e-5)
    exact = mx.quantize(mx.array(before[:1]), group_size=32, bits=8)
    assert loss("w", mx.array(before[:1]), QuantizedWeight(*exact, 8, 32)).relative < 1e-6


def test_perplexity_of_an_indifferent_model_is_its_vocabulary(tmp_path):
    weights = {
        name: np.zeros_like(array) if "embed" in name else array
        for name, array in llama_weights().items()
    }
    loaded = load_model(write_folder(tmp_path / "hf", weights), policy=REFERENCE)
    assert perplexity(loaded, TEXT) == pytest.approx(VOCAB, rel=1e-5)


def test_perplexity_does_not_depend_on_the_rows_of_a_pass(tmp_path, monkeypatch):
    loaded = load_model(write_folder(tmp_path / "hf"), policy=REFERENCE)
    whole = perplexity(loaded, TEXT)
    ids = loaded.tokenizer.encode(TEXT)
    caches = loaded.model.make_caches(len(ids), 0)
    output = loaded.model(mx.array(ids), caches, phase=Phase.PREFILL, logits="all")
    rows = np.asarray(output.logits, np.float64)[:-1]
    surprise = np.log(np.exp(rows).sum(-1)) - rows[np.arange(len(rows)), ids[1:]]
    assert whole == pytest.approx(math.exp(surprise.mean()), rel=1e-5)
    for rows in (1, 3, len(ids) - 1, len(ids)):
        monkeypatch.setattr("turbospark.loading.perplexity.ROWS", rows)
        assert perplexity(loaded, TEXT) == pytest.approx(whole, rel=1e-5)
    with pytest.raises(OptionError, match="1 tokens"):
        perplexity(loaded, "")


def test_routers_and_per_layer_tables_keep_8_bits():
    wish = Quantization(4, 64)
    for path in (
        "model.layers.0.mlp.gate", "model.layers.3.router.proj", "model.layers.3.mlp.router",
        "model.embed_tokens_per_layer", "model.per_layer_model_projection",
        "model.layers.1.per_layer_input_gate", "model.layers.1.per_layer_projection",
    ):  # fmt: skip
        assert is_careful(path)
        assert quantization_for(path, 128, wish) == Quantization(8, 64)
    for path in ("model.layers.0.mlp.gate_proj", "model.embed_tokens", "lm_head"):
        assert not is_careful(path)
        assert quantization_for(path, 128, wish) == wish
    assert quantization_for("lm_head", 96, wish) is None


def test_spellings_of_quantize():
    assert parse_quantize(None) is None
    assert parse_quantize("int4") == Quantization(4, 64)
    assert parse_quantize("int8-g32") == Quantization(8, 32)
    for text in ("INT4", "4", "int4-g16", "int7", "", "q4_k"):
        with pytest.raises(OptionError, match="int4-g32"):
            parse_quantize(text)


def test_entries_name_the_commonest_layout_once():
    layouts = {"a": Quantization(5, 32), "b": Quantization(4, 32), "c": Quantization(5, 32)}
    assert quantization_entries(layouts) == {
        "bits": 5, "group_size": 32, "mode": "affine", "b": {"bits": 4, "group_size": 32},
    }  # fmt: skip


def test_written_biases_stand_for_the_same_values():
    draw = np.random.default_rng(3)
    codes = mx.array(draw.integers(0, 2**32, (5, 8), dtype=np.uint32))
    scales = mx.array(draw.normal(size=(5, 2)).astype(np.float16))
    weight = QuantizedWeight(codes, scales, None, 4, 32, zero=8)
    written = with_biases(weight)
    assert written.zero is None
    assert written.biases.dtype == mx.float16
    assert np.array_equal(
        np.asarray(dequantize_reference(written)), np.asarray(dequantize_reference(weight))
    )
    assert with_biases(written) is written


def test_names_are_split_in_order_and_by_size():
    sizes = {"a": 3, "b": 4, "c": 20, "d": 1, "e": 5, "f": 5}
    assert split_names(sizes, 10) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert split_names({"a": 3}, 1) == [["a"]]


def test_written_shards_read_back(tmp_path):
    arrays = {name: mx.array(array) for name, array in llama_weights().items()}
    groups = split_names({name: array.nbytes for name, array in arrays.items()}, 60_000)
    total = write_shards(tmp_path, groups, lambda name: [(name, arrays[name])])
    assert total == sum(array.nbytes for array in arrays.values())
    back = load_arrays(read_checkpoint(tmp_path))
    assert all(mx.array_equal(back[name], array).item() for name, array in arrays.items())
    assert conversions.COPIED[0] == "tokenizer.json"

"""From files to a model with weights: every format gives the same numbers."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from loading.files import (
    LLAMA,
    VOCAB,
    bfloat16,
    gguf_metadata,
    gguf_name,
    gguf_tensors,
    llama_weights,
    q8_0,
    safetensors_bytes,
    two_shards,
    write_folder,
    write_gguf,
)
from mlx.utils import tree_flatten

from turbospark.errors import CheckpointError, ConfigError, OptionError, UnsupportedError
from turbospark.kernels import embedding, quantized_matmul
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading import install
from turbospark.loading.build import load_model
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_weights import gguf_config, gguf_weights
from turbospark.loading.install import parameter_slots
from turbospark.nn.linear import Matrix
from turbospark.protocols import Phase
from turbospark.registry import GGUF_GROUP, resolve_family
from turbospark.settings import KernelPolicy

REFERENCE = KernelPolicy(kernels="reference")
TOKENS = [1, 77, 5, 200, 31, 262, 9]


def load(path, **options):
    return load_model(path, policy=REFERENCE, **options)


def logits(loaded):
    caches = loaded.model.make_caches(50, 3)
    output = loaded.model(mx.array(TOKENS), caches, phase=Phase.PREFILL, logits="all")
    return np.asarray(output.logits)


def matrices(loaded):
    slots = parameter_slots(loaded.model)
    return {name: slot.module.value for name, slot in slots.items() if slot.is_matrix}


def mlx_quantized(weights, overrides=(), bits=4, group_size=32):
    """A checkpoint as MLX writes it, and the float weights that it stands for."""
    stored, dense = {}, {}
    for name, array in weights.items():
        path = name.removesuffix(".weight")
        if array.ndim < 2:
            stored[name] = dense[name] = array
            continue
        width = dict(overrides).get(path, bits)
        parts = mx.quantize(mx.array(array), group_size=group_size, bits=width)
        names = (name, f"{path}.scales", f"{path}.biases")
        stored |= {part: np.asarray(value) for part, value in zip(names, parts, strict=True)}
        dense[name] = np.asarray(mx.dequantize(*parts, group_size=group_size, bits=width))
    return stored, dense


def test_float_folder_loads_every_tensor(tmp_path):
    weights = llama_weights()
    loaded = load(write_folder(tmp_path / "model", weights))
    for name, array in tree_flatten(loaded.model.parameters()):
        assert np.array_equal(np.asarray(array), weights[name]), name
    assert loaded.config == LLAMA
    assert loaded.source == tmp_path / "model"
    assert loaded.stop_ids == {2}
    assert loaded.kernels.name == "reference"
    assert sum(loaded.bodies.values()) > 0
    assert loaded.tokenizer.encode("a")[0] == 1


def test_shards_and_half_precision_change_nothing_but_the_type(tmp_path):
    weights = llama_weights()
    whole = logits(load(write_folder(tmp_path / "one", weights)))
    sharded = load(write_folder(tmp_path / "two", weights, shards=two_shards(weights)))
    assert np.array_equal(logits(sharded), whole)
    halves = {name: bfloat16(array) for name, array in weights.items()}
    loaded = load(write_folder(tmp_path / "half", halves))
    assert loaded.model.model.embed_tokens.weight.dtype == mx.bfloat16
    assert loaded.model.model.norm.weight.dtype == mx.float32
    assert np.array_equal(logits(loaded), whole)


def test_mlx_checkpoint_equals_its_dequantized_weights(tmp_path):
    overrides = {"model.embed_tokens": 8, "model.layers.1.mlp.down_proj": 3}
    stored, dense = mlx_quantized(llama_weights(), overrides)
    entries = {path: {"bits": bits, "group_size": 32} for path, bits in overrides.items()}
    config = LLAMA | {"quantization": {"bits": 4, "group_size": 32, **entries}}
    loaded = load(write_folder(tmp_path / "int4", stored, config))
    bits = {name: weight.bits for name, weight in matrices(loaded).items()}
    assert bits["model.embed_tokens.weight"] == 8
    assert bits["model.layers.1.mlp.down_proj.weight"] == 3
    assert bits["model.layers.0.mlp.down_proj.weight"] == 4
    expected = logits(load(write_folder(tmp_path / "float", dense)))
    assert np.abs(logits(loaded) - expected).max() < 1e-4


def test_quantizing_at_load_equals_a_quantized_checkpoint(tmp_path):
    weights = llama_weights()
    stored, _ = mlx_quantized(weights)
    config = LLAMA | {"quantization": {"bits": 4, "group_size": 32}}
    expected = logits(load(write_folder(tmp_path / "int4", stored, config)))
    loaded = load(write_folder(tmp_path / "float", weights), quantize="int4-g32")
    assert all(isinstance(weight, QuantizedWeight) for weight in matrices(loaded).values())
    assert np.array_equal(logits(loaded), expected)


def test_matrices_whose_width_does_not_divide_stay_float(tmp_path):
    loaded = load(write_folder(tmp_path / "model"), quantize="int8")  # groups of 64
    kinds = {name: isinstance(weight, QuantizedWeight) for name, weight in matrices(loaded).items()}
    assert kinds["model.layers.0.self_attn.q_proj.weight"]  # 64 wide
    assert not kinds["model.layers.0.self_attn.o_proj.weight"]  # 96 wide
    assert not kinds["model.layers.0.mlp.down_proj.weight"]  # 160 wide


def test_gguf_equals_the_folder_it_was_made_from(tmp_path):
    expected = logits(load(write_folder(tmp_path / "hf")))
    loaded = load(write_gguf(tmp_path / "a.gguf"))
    assert np.array_equal(logits(loaded), expected)  # q and k rows are back in their order
    assert loaded.stop_ids == {2}
    assert loaded.config["tie_word_embeddings"] is True
    assert loaded.config["vocab_size"] == VOCAB
    blocks = load(write_gguf(tmp_path / "b.gguf", tensors=gguf_tensors(encode=q8_0)))
    weight = matrices(blocks)["model.layers.1.self_attn.q_proj.weight"]
    assert isinstance(weight, QuantizedWeight)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(np.asarray(dequantize_reference(weight)), llama_weights()[name])
    assert np.abs(logits(blocks) - expected).max() < 1e-4


@pytest.mark.parametrize("encode", [q8_0, None], ids=["blocks", "floats"])
def test_the_stream_of_a_gguf_file_has_the_range_of_float32_on_a_gpu(tmp_path, monkeypatch, encode):
    """Blocks have float16 factors, and a stream in float16 overflows in Gemma 3."""
    for module in (install, embedding, quantized_matmul):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    loaded = load(write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=encode)))
    assert loaded.model.embed(mx.array([3, 1])).dtype == mx.bfloat16
    held = matrices(loaded).values()
    assert all(isinstance(w, QuantizedWeight) == (encode is not None) for w in held)
    assert all(w.dtype == mx.bfloat16 for w in held if isinstance(w, mx.array))
    caches = loaded.model.make_caches(9, 4)
    output = loaded.model(mx.array([1, 2]), caches, phase=Phase.PREFILL)
    assert mx.isfinite(output.logits).all()


def test_the_stream_of_a_folder_has_its_own_type_on_a_gpu(tmp_path, monkeypatch):
    for module in (install, embedding, quantized_matmul):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    loaded = load(write_folder(tmp_path / "hf"))
    assert loaded.model.embed(mx.array([3, 1])).dtype == mx.float32


def test_gguf_with_an_output_tensor_is_not_tied(tmp_path):
    head = np.random.default_rng(8).normal(size=(VOCAB, 64)).astype(np.float32)
    tensors = gguf_tensors() | {"output.weight": (0, head.shape, head.tobytes())}
    loaded = load(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    assert loaded.config["tie_word_embeddings"] is False
    assert np.array_equal(np.asarray(loaded.model.lm_head.weight), head)


def test_gguf_of_mixed_types_can_be_quantized_where_it_is_float(tmp_path):
    def mostly(name, matrix):
        return (0, matrix.tobytes()) if "ffn_up" in name else q8_0(name, matrix)

    path = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=mostly))
    loaded = load(path, quantize="int4-g32")
    bits = {name: weight.bits for name, weight in matrices(loaded).items()}
    assert bits["model.layers.0.mlp.up_proj.weight"] == 4
    assert bits["model.layers.0.mlp.gate_proj.weight"] == 8


def test_offset_of_norms_is_taken_off_and_nothing_else_changes(tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "a.gguf"))
    mapping = replace(resolve_family("llama", GGUF_GROUP).gguf["llama"], norm_offset=0.25)
    found = gguf_weights(file, mapping, gguf_config(file, mapping))
    for name, expected in llama_weights().items():
        offset = 0.25 if name.endswith("norm.weight") else 0.0
        assert np.array_equal(np.asarray(found[name]), expected - np.float32(offset)), name


def test_model_loaded_in_a_thread_runs_in_another(tmp_path):
    folder = write_folder(tmp_path / "a")
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load, folder).result()
    assert np.array_equal(logits(loaded), logits(load(folder)))


def test_progress_ends_at_the_total(tmp_path):
    for path in (write_folder(tmp_path / "hf"), write_gguf(tmp_path / "a.gguf")):
        calls = []
        load(path, progress=lambda done, total, calls=calls: calls.append((done, total)))
        total = calls[-1][1]
        assert calls[-1] == (total, total)
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert total == sum(array.nbytes for array in llama_weights().values())


def refused(path, *words, kind=CheckpointError, **options):
    with pytest.raises(kind) as caught:
        load(path, **options)
    for word in words:
        assert word in str(caught.value)


def test_missing_left_over_and_misshapen_tensors_are_one_error(tmp_path):
    weights = llama_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.7.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    weights["model.norm.weight"] = np.zeros(63, np.float32)
    refused(
        write_folder(tmp_path / "model", weights),
        "model.safetensors", "1 tensors are missing ('model.layers.1.mlp.up_proj.weight')",
        "1 are left over ('model.layers.7.mlp.up_proj.weight')",
        "'model.norm.weight' is (63,) where (64,) is needed",
    )  # fmt: skip


def test_a_model_that_lacks_most_of_its_tensors_gets_a_short_error(tmp_path):
    weights = {"model.norm.weight": np.ones(64, np.float32)}
    with pytest.raises(CheckpointError) as caught:
        load(write_folder(tmp_path / "model", weights))
    assert "19 tensors are missing" in str(caught.value)
    assert len(str(caught.value)) < 700


def test_integers_and_quantized_vectors_do_not_fit(tmp_path):
    weights = llama_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.uint32)
    refused(write_folder(tmp_path / "a", weights), "model.norm.weight", ".scales")
    norm = llama_weights()["model.norm.weight"]
    raw = b"".join(
        np.float16(1).tobytes() + np.zeros(32, np.int8).tobytes() for _ in range(len(norm) // 32)
    )
    tensors = gguf_tensors() | {"output_norm.weight": (8, norm.shape, raw)}
    refused(write_gguf(tmp_path / "a.gguf", tensors=tensors), "model.norm.weight", "quantized")


def test_gguf_tensor_that_the_family_does_not_know_is_told_from_a_damaged_file(tmp_path):
    extra = np.ones((5, 32), np.float32)
    tensors = gguf_tensors() | {"blk.0.attn_rel_b.weight": (0, extra.shape, extra.tobytes())}
    refused(
        write_gguf(tmp_path / "a.gguf", tensors=tensors),
        "a.gguf is whole", "blk.0.attn_rel_b.weight", "'llama'", kind=UnsupportedError,
    )  # fmt: skip


def test_experts_in_a_file_of_a_dense_model_are_left_over(tmp_path):
    extra = np.ones((5, 32), np.float32)
    tensors = gguf_tensors() | {"blk.0.ffn_gate_exps.weight": (0, extra.shape, extra.tobytes())}
    refused(
        write_gguf(tmp_path / "a.gguf", tensors=tensors), "a.gguf", "1 are left over", "experts"
    )


def test_gguf_rope_divisors_of_llama_3_become_its_scaling(tmp_path):
    theta, factor = 500_000.0, 8.0
    plain = theta ** -(np.arange(0, 32, 2) / 32)
    wavelength = 2 * np.pi / plain
    blend = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    divisors = (1 / ((1 - blend) / factor + blend)).astype(np.float32)
    metadata = gguf_metadata(**{"llama.rope.freq_base": theta})
    tensors = gguf_tensors() | {"rope_freqs.weight": (0, (16,), divisors.tobytes())}
    loaded = load(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    assert loaded.config["rope_scaling"]["rope_type"] == "llama3"
    config = LLAMA | {"rope_theta": theta, "rope_scaling": loaded.config["rope_scaling"]}
    assert np.array_equal(logits(loaded), logits(load(write_folder(tmp_path / "hf", None, config))))
    tensors["rope_freqs.weight"] = (0, (16,), (divisors * 1.5).tobytes())
    refused(write_gguf(tmp_path / "b.gguf", metadata, tensors), "b.gguf", "rope_freqs.weight",
            kind=UnsupportedError)  # fmt: skip


def test_fields_that_a_family_refuses_name_the_file(tmp_path):
    folder = write_folder(tmp_path / "a", config=LLAMA | {"hidden_size": "64"})
    refused(folder, "config.json", "hidden_size", kind=ConfigError)
    folder = write_folder(tmp_path / "b", config=LLAMA | {"model_type": "llama9"})
    refused(folder, "config.json", "llama9", "llama", kind=UnsupportedError)
    metadata = gguf_metadata(**{"general.architecture": "mamba"})
    refused(write_gguf(tmp_path / "a.gguf", metadata), "a.gguf", "mamba", kind=UnsupportedError)
    fewer = {key: value for key, value in gguf_metadata().items() if "block_count" not in key}
    refused(write_gguf(tmp_path / "b.gguf", fewer), "b.gguf", "block_count", kind=ConfigError)


def test_options_that_do_not_apply_are_refused(tmp_path):
    folder = write_folder(tmp_path / "float")
    refused(folder, "int7", kind=OptionError, quantize="int7")
    refused(folder, "dequantize", kind=OptionError, dequantize=True)
    stored, _ = mlx_quantized(llama_weights())
    config = LLAMA | {"quantization": {"bits": 4, "group_size": 32}}
    refused(write_folder(tmp_path / "int4", stored, config), "already", kind=OptionError,
            quantize="int4")  # fmt: skip
    path = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=q8_0))
    refused(path, "already", kind=OptionError, quantize="int4")


def test_wrapper_is_resolved_by_its_own_type(tmp_path):
    config = {"model_type": "llava", "text_config": LLAMA}
    refused(write_folder(tmp_path / "a", config=config), "llava", kind=UnsupportedError)


def test_stop_ids_unite_configuration_generation_and_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "a", config=LLAMA | {"eos_token_id": [5]})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load(folder).stop_ids == {2, 5, 7}


def test_a_stop_id_that_only_one_file_names_is_enough(tmp_path):
    silent = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    only_tokenizer = write_folder(tmp_path / "a", config=silent)
    assert load(only_tokenizer).stop_ids == {2}
    named = {"tokenizer.ggml.eos_token_id": 9}
    assert load(write_gguf(tmp_path / "a.gguf", metadata=gguf_metadata() | named)).stop_ids == {9}


def test_loading_holds_one_copy_of_the_weights(tmp_path):
    weights = llama_weights()
    size = sum(array.nbytes for array in weights.values())
    folder = write_folder(tmp_path / "a", weights)
    gguf = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=q8_0))
    for path, held in ((folder, size), (gguf, size * 34 / 128)):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        loaded = load(path)
        assert mx.get_peak_memory() - before < 1.5 * held
        del loaded


def test_every_matrix_of_the_tiny_model_is_a_matrix(tmp_path):
    loaded = load(write_folder(tmp_path / "a"))
    slots = parameter_slots(loaded.model)
    assert {name for name, slot in slots.items() if isinstance(slot.module, Matrix)} == {
        name for name, array in llama_weights().items() if array.ndim == 2
    }
    assert gguf_name("model.layers.1.mlp.up_proj.weight") == "blk.1.ffn_up.weight"


def test_a_second_file_beside_model_safetensors_is_not_read(tmp_path):
    folder = write_folder(tmp_path / "a")
    expected = logits(load(folder))
    strange = {name: array * np.nan for name, array in llama_weights().items()}
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes(strange))
    assert np.array_equal(logits(load(folder)), expected)

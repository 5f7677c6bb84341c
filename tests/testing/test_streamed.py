"""The kind whose experts have files of their own: each can be read by offset, and all are."""

import json
import os

import mlx.core as mx
import pytest

import turbospark as ts
from turbospark.cli.main import main
from turbospark.loading.checkpoint import INDEX, load_arrays, read_checkpoint
from turbospark.loading.safetensors import read_slots
from turbospark.settings import UNBUILT
from turbospark.testing import synthetic
from turbospark.testing.aligned import PAGE, write_aligned

FORMS = ["int4", "int8-g32", None]
FILES = [f"model-0000{number}-of-00007.safetensors" for number in range(1, 8)]


def logits_of(folder):
    engine = ts.load(folder, kernels="reference")
    return engine.runner.prefill_chunk([1, 200, 3, 77], engine.runner.session.position)


@pytest.mark.parametrize("quantize", FORMS)
def test_it_is_the_model_that_one_file_holds(tmp_path, quantize):
    apart = synthetic(tmp_path / "a", "streamed", quantize=quantize, seed=3)
    whole = synthetic(tmp_path / "b", "moe", num_experts=32, quantize=quantize, seed=3)
    assert (apart / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    assert (whole / "model.safetensors").exists()
    assert not (apart / "model.safetensors").exists()
    arrays, others = (load_arrays(read_checkpoint(folder)) for folder in (apart, whole))
    assert arrays.keys() == others.keys()
    assert all(mx.array_equal(array, others[name]) for name, array in arrays.items())
    assert mx.array_equal(logits_of(apart), logits_of(whole))


@pytest.mark.parametrize("quantize", FORMS)
def test_experts_lie_in_a_file_of_each_layer_and_are_most_of_it(tmp_path, quantize):
    folder = synthetic(tmp_path / "a", "streamed", quantize=quantize)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == FILES
    rest, *experts = (read_slots(folder / name) for name in FILES)
    assert not any(".experts." in name for name in rest)
    kinds = 1 if quantize is None else 3
    for layer, slots in enumerate(experts):
        assert len(slots) == 3 * kinds
        assert all(name.startswith(f"model.layers.{layer}.experts.") for name in slots)
    sizes = [(folder / name).stat().st_size for name in FILES]
    assert sum(sizes[1:]) > 0.75 * sum(sizes)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(
        slot.nbytes for slots in (rest, *experts) for slot in slots.values()
    )


def test_files_follow_the_layers_past_the_tenth(tmp_path):
    folder = synthetic(tmp_path / "a", "streamed", num_hidden_layers=11)
    for layer in range(11):
        slots = read_slots(folder / f"model-{layer + 2:05d}-of-00012.safetensors")
        assert {int(name.split(".")[2]) for name in slots} == {layer}


@pytest.mark.parametrize("quantize", FORMS)
def test_an_expert_is_read_by_offset_from_aligned_tensors(tmp_path, quantize):
    folder = synthetic(tmp_path / "a", "streamed", quantize=quantize)
    whole = synthetic(tmp_path / "b", "moe", num_experts=32, quantize=quantize)
    arrays = mx.load(str(whole / "model.safetensors"))
    for file in FILES[1:]:
        descriptor = os.open(folder / file, os.O_RDONLY)
        for name, slot in read_slots(folder / file).items():
            assert slot.offset % PAGE == 0, name
            size = slot.nbytes // 32
            for expert in (0, 13, 31):
                read = os.pread(descriptor, size, slot.offset + expert * size)
                assert read == bytes(arrays[name][expert].reshape(-1).view(mx.uint8)), name
        os.close(descriptor)


def test_tensors_of_other_sizes_are_aligned_as_far_as_they_can_be(tmp_path):
    folder = synthetic(tmp_path / "a", "streamed", num_experts=17, moe_intermediate_size=192)
    slots = [slot for file in FILES[1:] for slot in read_slots(folder / file).values()]
    assert all(slot.offset % min(PAGE, slot.nbytes & -slot.nbytes) == 0 for slot in slots)
    assert any(slot.nbytes % PAGE for slot in slots)
    assert all(slot.offset % PAGE == 0 for slot in slots if slot.nbytes % PAGE == 0)


def test_every_type_is_written_as_mlx_reads_it(tmp_path):
    types = (mx.uint8, mx.int64, mx.bfloat16, mx.float16, mx.float32, mx.uint32)
    tensors = {f"{i}": mx.arange(3 * i + 5).astype(kind) for i, kind in enumerate(types)}
    tensors |= {"transposed": mx.arange(6).reshape(2, 3).T, "scalar": mx.array(2.5)}
    write_aligned(tmp_path / "a", tensors)
    write_aligned(tmp_path / "b", dict(reversed(tensors.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert min(slot.offset for slot in read_slots(tmp_path / "a").values()) == PAGE
    read = mx.load(str(tmp_path / "a"), format="safetensors")
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert mx.array_equal(read[name], array)


def test_inspect_refuses_to_stream_it_as_it_does_any(tmp_path, capsys):
    assert main(["synthetic", str(tmp_path / "a"), "--kind", "streamed"]) == 0
    assert "3 of 32 experts of 64" in capsys.readouterr().out
    found = ts.inspect(tmp_path / "a")
    assert found.abilities["streaming"] == (False, UNBUILT["residency"].reason)
    other = synthetic(tmp_path / "b", "moe", num_experts=32)
    shown = repr(ts.inspect(other)).replace(str(other), str(tmp_path / "a"))
    assert repr(found) == shown.replace(", 1 file\n", ", 7 files\n")

"""Whether a loaded model is what the bytes on disk say, by readers without a single check."""

import json

import mlx.core as mx
import numpy as np
from loading import naive
from loading.files import gguf_name
from mlx.utils import tree_flatten

from turbospark.loading.install import parameter_slots
from turbospark.nn.linear import Matrix

F32, Q8_0 = 0, 8


def same_as_folder(loaded, folder, files):
    """Every parameter equals the bytes of the safetensors files, and config.json is as read."""
    assert loaded.config == json.loads((folder / "config.json").read_bytes())
    tensors = {}
    for file in files:
        tensors |= naive.safetensors((folder / file).read_bytes())
    parameters = dict(tree_flatten(loaded.model.parameters()))
    assert parameters.keys() == tensors.keys()
    for name, array in parameters.items():
        raw, shape, dtype = tensors[name]
        assert array.shape == shape
        if dtype == "F32":
            assert np.asarray(array).tobytes() == raw


def raw_blocks(weight):
    """The bytes that a weight was read from: F32, or Q8_0 put together again."""
    if isinstance(weight, mx.array):
        return np.asarray(weight).tobytes()
    scales = np.asarray(weight.scales).reshape(-1, 1).view(np.uint8)
    codes = np.asarray(weight.codes).view(np.uint8).reshape(-1, 32) ^ 0x80
    return np.concatenate([scales, codes], axis=-1).tobytes()


def same_as_gguf(loaded, raw):
    """Every parameter of a tiny llama equals the bytes of its GGUF file."""
    tensors = naive.Gguf(raw).tensors
    slots = parameter_slots(loaded.model)
    assert {gguf_name(name) for name in slots} == set(tensors)
    for name, slot in slots.items():
        kind, shape, at = tensors[gguf_name(name)]
        value = slot.module.value if isinstance(slot.module, Matrix) else slot.module.weight
        assert tuple(value.shape) == shape
        if kind not in {F32, Q8_0}:
            continue
        found = raw_blocks(value)
        stored = raw[at : at + len(found)]
        if "q_proj" in name or "k_proj" in name:  # their rows stand in another order in the file
            found, stored = (np.frombuffer(part, np.uint8).reshape(shape[0], -1).tolist()
                             for part in (found, stored))  # fmt: skip
            found, stored = sorted(found), sorted(stored)
        assert found == stored, name

"""Files as sound writers may lay them out: whatever the layout, what loads is what is on disk."""

import json
import struct

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading.disk import same_as_folder, same_as_gguf
from loading.files import (
    gguf_bytes,
    gguf_metadata,
    gguf_tensors,
    llama_weights,
    q8_0,
    safetensors_bytes,
    write_folder,
)

from turbospark.loading.build import load_model
from turbospark.settings import KernelPolicy

REFERENCE = KernelPolicy(kernels="reference")
LAYOUTS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TEXT = st.text(max_size=40)
EXTRA = st.one_of(
    TEXT, st.booleans(), st.integers(0, 2**32 - 1), st.floats(width=32, allow_nan=False),
    st.lists(TEXT, min_size=1, max_size=3), st.lists(st.integers(-9, 9), min_size=1, max_size=9),
)  # fmt: skip


@LAYOUTS
@given(data=st.data(), spaces=st.integers(0, 17), note=TEXT)
def test_any_layout_of_a_safetensors_file_loads_as_it_stands(tmp_path_factory, data, spaces, note):
    folder = write_folder(tmp_path_factory.getbasetemp() / "layouts")
    names = data.draw(st.permutations(list(llama_weights())))
    raw = safetensors_bytes({name: llama_weights()[name] for name in names})
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] = {"note": note}
    listed = data.draw(st.permutations(list(header)))  # need not be the order of the data
    text = json.dumps({name: header[name] for name in listed}).encode() + b" " * spaces
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    same_as_folder(load_model(folder, policy=REFERENCE), folder, [path.name])


@LAYOUTS
@given(
    data=st.data(),
    extra=st.dictionaries(TEXT.map("some.key.{}".format), EXTRA, max_size=4),
    alignment=st.sampled_from([1, 2, 8, 32, 64, 4096]),
    blocks=st.booleans(),
)
def test_any_layout_of_a_gguf_file_loads_as_it_stands(
    tmp_path_factory, data, extra, alignment, blocks
):
    metadata = gguf_metadata() | extra | {"general.alignment": alignment}
    metadata = {key: metadata[key] for key in data.draw(st.permutations(list(metadata)))}
    tensors = gguf_tensors(encode=q8_0 if blocks else None)
    tensors = {name: tensors[name] for name in data.draw(st.permutations(list(tensors)))}
    raw = gguf_bytes(metadata, tensors, alignment=alignment)
    path = tmp_path_factory.getbasetemp() / "layouts.gguf"
    path.write_bytes(raw)
    same_as_gguf(load_model(path, policy=REFERENCE), raw)

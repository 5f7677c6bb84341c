"""Damaged files: an error that names the file, or a load that equals the bytes on disk."""

import resource
import time
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import naive
from loading.disk import F32, Q8_0, raw_blocks, same_as_folder, same_as_gguf
from loading.files import (
    gguf_bytes,
    gguf_metadata,
    gguf_tensors,
    llama_weights,
    q8_0,
    two_shards,
    write_folder,
)

from turbospark.errors import TurbosparkError
from turbospark.loading.build import load_model
from turbospark.loading.checkpoint import INDEX
from turbospark.loading.gguf import GGUFFile
from turbospark.settings import KernelPolicy

REFERENCE = KernelPolicy(kernels="reference")
FUZZ = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SECONDS = 10
MEGABYTES = 300


def damages(size, header):
    """Ways to damage a file: mostly in its header, sometimes anywhere."""
    place = st.one_of(st.integers(0, header - 1), st.integers(0, size - 1))
    small = st.binary(min_size=1, max_size=9)
    return st.one_of(
        st.tuples(st.just("flip"), place, st.integers(1, 255)),
        st.tuples(st.just("cut"), place, st.just(0)),
        st.tuples(st.just("drop"), place, st.integers(1, 40)),
        st.tuples(st.just("grow"), place, small),
        st.tuples(st.just("write"), place, small),
        st.tuples(st.just("write"), place, st.sampled_from(
            [bytes(8), b"\xff" * 8, b"\0\0\0\0\0\0\0\x80", b"\0" * 4 + b"\1" + b"\0" * 3]
        )),
    )  # fmt: skip


def damaged(raw, damage):
    how, at, what = damage
    if how == "flip":
        return raw[:at] + bytes([raw[at] ^ what]) + raw[at + 1 :]
    if how == "cut":
        return raw[:at]
    if how == "drop":
        return raw[:at] + raw[at + what :]
    if how == "grow":
        return raw[:at] + what + raw[at:]
    return raw[:at] + what + raw[at + len(what) :]


def outcome(work, names):
    """The result of `work`, or None when it refused; a refusal names one of the files."""
    started = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = None
    try:
        # Numbers that damage made infinite or not a number may warn; loading does not judge them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            result = work()
    except TurbosparkError as error:
        message = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert message is None or any(name in message for name in names), message
    assert grown < MEGABYTES * 1024, f"{grown} KiB more memory"
    assert time.perf_counter() - started < SECONDS
    return result if message is None else None


def load(path):
    return load_model(path, policy=REFERENCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("fuzz") / "hf")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    weights = llama_weights()
    return write_folder(tmp_path_factory.mktemp("fuzz") / "hf", weights, None, two_shards(weights))


GGUF = gguf_bytes(gguf_metadata(), gguf_tensors(encode=q8_0))
GGUF_HEADER = GGUF.index(b"output_norm") + 1500


def try_folder(folder, name, damage, files):
    path = folder / name
    good = path.read_bytes()
    path.write_bytes(damaged(good, damage))
    try:
        loaded = outcome(lambda: load(folder), [name, *files, "config.json", "tokenizer"])
        if loaded is not None:
            same_as_folder(loaded, folder, files)
    finally:
        path.write_bytes(good)


@FUZZ
@given(data=st.data())
def test_damaged_safetensors(folder, data):
    size = (folder / "model.safetensors").stat().st_size
    damage = data.draw(damages(size, 2500))
    try_folder(folder, "model.safetensors", damage, ["model.safetensors"])


@FUZZ
@given(data=st.data())
def test_damaged_config(folder, data):
    size = (folder / "config.json").stat().st_size
    try_folder(folder, "config.json", data.draw(damages(size, size)), ["model.safetensors"])


@FUZZ
@given(data=st.data())
def test_damaged_index_and_shards(sharded, data):
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    name = data.draw(st.sampled_from([INDEX, *files]))
    size = (sharded / name).stat().st_size
    damage = data.draw(damages(size, min(size, 1500)))
    good = (sharded / name).read_bytes()
    (sharded / name).write_bytes(damaged(good, damage))
    try:
        loaded = outcome(lambda: load(sharded), [INDEX, *files])
        if loaded is not None:
            same_as_folder(loaded, sharded, files)
    finally:
        (sharded / name).write_bytes(good)


@FUZZ
@given(damage=damages(len(GGUF), GGUF_HEADER))
def test_damaged_gguf_header_and_blocks(tmp_path_factory, damage):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    raw = damaged(GGUF, damage)
    path.write_bytes(raw)

    def read():
        file = GGUFFile(path)
        return file, {name: file.read(name) for name in file.tensors}

    found = outcome(read, ["small.gguf"])
    if found is not None:
        file, weights = found
        expected = naive.Gguf(raw)
        assert repr(file.metadata) == repr(expected.metadata)
        assert set(weights) == set(expected.tensors)
        for name, weight in weights.items():
            kind, shape, at = expected.tensors[name]
            assert tuple(weight.shape) == shape
            if kind in {F32, Q8_0}:
                found_bytes = raw_blocks(weight)
                assert found_bytes == raw[at : at + len(found_bytes)]
    path.unlink()


@FUZZ
@given(damage=damages(len(GGUF), GGUF_HEADER))
def test_damaged_gguf_models(tmp_path_factory, damage):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    raw = damaged(GGUF, damage)
    path.write_bytes(raw)
    loaded = outcome(lambda: load(path), ["small.gguf"])
    if loaded is not None:
        same_as_gguf(loaded, raw)
    path.unlink()

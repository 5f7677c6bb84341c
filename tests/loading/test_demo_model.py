"""The real demo checkpoint: lossless, lean and quick to load."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from gguf import constants, quants

from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.demo import PACKAGE, demo_file
from turbospark.loading.gguf import GGUFFile

pytest.importorskip(PACKAGE)
pytestmark = pytest.mark.checkpoint

MEASURE = """
import time
import mlx.core as mx
from turbospark.loading.build import load_model
from turbospark.loading.plan import plan
from turbospark.settings import KernelPolicy
started = time.perf_counter()
loaded = load_model("demo", policy=KernelPolicy(kernels="reference"))
seconds = time.perf_counter() - started
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
process = 1024 * int(status["VmHWM"].split()[0])
print(seconds, process, mx.get_peak_memory(), loaded.source.stat().st_size,
      plan("demo").weight_bytes)
"""


LAYERS = ("blk.0.", "blk.9.", "blk.17.")


def test_every_tensor_equals_the_gguf_packages_values():
    file = GGUFFile(demo_file())
    raw = np.memmap(file.path, np.uint8, "r")
    kinds = set()
    for name, tensor in file.tensors.items():
        if tensor.nbytes > 20_000_000 or (name.startswith("blk.") and not name.startswith(LAYERS)):
            continue  # the reference is slow; these have every format
        block = raw[tensor.offset : tensor.offset + tensor.nbytes]
        kind = constants.GGMLQuantizationType[tensor.type.name]
        expected = quants.dequantize(block, kind).reshape(tensor.shape)
        weight = file.read(name)
        dense = dequantize_reference(weight) if isinstance(weight, QuantizedWeight) else weight
        assert np.array_equal(np.asarray(dense), expected), name
        kinds.add(tensor.type.name)
    assert kinds == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_stays_within_its_memory_budget():
    output = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    ).stdout
    seconds, process, peak, size, planned = map(float, output.split())
    assert process < 2.3 * size
    assert peak < 1.1 * size  # the codes are written where they stay
    assert abs(planned - peak) < 0.05 * peak
    assert seconds < 20  # 0.5 s of conversion and 0.5 s of tokenizer on an idle machine


def test_vocabulary_and_end_ids_come_from_the_file():
    file = GGUFFile(demo_file())
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 262_144
    assert file.tensors["token_embd.weight"].shape == (262_144, 640)
    assert file.read("output_norm.weight").dtype == mx.float32

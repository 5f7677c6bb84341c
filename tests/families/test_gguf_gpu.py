"""GGUF files on a GPU: blocks of every kind under a stream of bfloat16, through the bodies."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from kernels.cases_gpu import resolve
from loading.files import gguf_tensors, write_gguf
from loading.test_expert_gguf import metadata as expert_metadata
from loading.test_expert_gguf import tensors as expert_tensors

from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.loading.build import load_model
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

PROMPT, REST = [1, 77, 5], [200, 31, 262]
REFERENCE = KernelPolicy(kernels="reference")
KINDS = ["F16", "F32", "Q4_0", "Q4_1", "Q5_0", "Q8_0"]
BOUND = 0.03  # of the largest logit; bfloat16 rounds to 0.004

Encode = Callable[[str, np.ndarray], tuple[int, bytes]]


def encoded(kind: str) -> Encode:
    which = GGMLQuantizationType[kind]
    return lambda _, matrix: (which.value, quants.quantize(matrix, which).tobytes())


def logits(model: Any) -> np.ndarray:
    """[3, V], each row after a step of one token."""
    caches = model.make_caches(50, 9)
    mx.eval(model(mx.array(PROMPT), caches, phase=Phase.PREFILL).logits)
    rows = [model(mx.array([token]), caches, phase=Phase.DECODE).logits for token in REST]
    return np.array(mx.concatenate(rows).astype(mx.float32))


@pytest.mark.parametrize("target", ["emulation", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_file_decode_as_in_float32(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = resolve(target)
    assert gpu is not None
    path = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=encoded(kind)))
    with mx.stream(mx.cpu):
        wanted = logits(load_on(path, monkeypatch, on_cpu=True))
    assert_near(bound(path, gpu, monkeypatch), wanted)


@pytest.mark.parametrize("target", ["emulation", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_stacked_experts_decode_as_without_bodies(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same types: in others a row goes to other experts where two scores are close."""
    gpu, encode = resolve(target), encoded(kind)
    assert gpu is not None
    given = expert_tensors(lambda array: encode("", array))
    path = write_gguf(tmp_path / "a.gguf", expert_metadata(), given)
    with mx.stream(mx.cpu):
        wanted = logits(load_on(path, monkeypatch, on_cpu=False))
    assert_near(bound(path, gpu, monkeypatch), wanted)


def bound(path: Path, gpu: GpuTarget, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file's model with a GPU's bodies."""
    model = load_on(path, monkeypatch, on_cpu=False)
    bind_units(model, GpuKernels(gpu, KernelPolicy()))
    assert model.embed(mx.array([3])).dtype == mx.bfloat16
    return model


def assert_near(model: Any, wanted: np.ndarray) -> None:
    assert np.abs(logits(model) - wanted).max() < BOUND * np.abs(wanted).max()


def load_on(path: Path, monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool) -> Any:
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("turbospark.") and name != "turbospark.kernels.gpu.kernel"
        if is_ours and hasattr(module, "on_cpu"):
            monkeypatch.setattr(module, "on_cpu", lambda: on_cpu)
    return load_model(path, policy=REFERENCE).model

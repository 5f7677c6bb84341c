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

from turbospark.kernels.experts import route_reference
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.loading.build import load_model
from turbospark.nn import moe
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

PROMPT, REST = [1, 77, 5], [200, 31, 262]
REFERENCE = KernelPolicy(kernels="reference")
KINDS = ["F16", "F32", "Q4_0", "Q4_1", "Q5_0", "Q8_0"]
BOUND = 0.03  # of the largest logit; bfloat16 rounds to 0.004
BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34}  # two of them a factor in float16
FIRST = {
    (token, layer): (3 * place + layer) % 8
    for place, token in enumerate(PROMPT + REST)
    for layer in range(3)
}
"""The expert that a token's row is sent to first in a layer."""

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
def test_stacked_experts_decode_as_in_float32(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = resolve(target)
    assert gpu is not None
    path = write_gguf(tmp_path / "a.gguf", expert_metadata(), routed_tensors(kind))
    wanted, gap = routed_logits(path, monkeypatch)
    assert gap > 0.5  # a stream of bfloat16 moves scores by less than 0.03
    assert_near(bound(path, gpu, monkeypatch), wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("fault", ["experts one place on", "factors of one expert"])
def test_a_fault_in_one_layer_would_be_noticed(
    fault: str, part: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = routed_tensors(kind)
    right = write_gguf(tmp_path / "a.gguf", expert_metadata(), given)
    name = f"blk.1.ffn_{part}_exps.weight"
    which, shape, raw = given[name]
    blocks = np.frombuffer(raw, np.uint8).reshape(shape[0], -1, BLOCK_BYTES[kind]).copy()
    if fault == "experts one place on":
        blocks = np.roll(blocks, 1, axis=0)
    else:
        blocks[FIRST[REST[0], 1], :, :2].view(np.float16)[:] *= 1.5
    given[name] = (which, shape, blocks.tobytes())
    wrong = write_gguf(tmp_path / "b.gguf", expert_metadata(), given)
    wanted, _ = routed_logits(right, monkeypatch)
    assert largest_share(routed_logits(wrong, monkeypatch)[0], wanted) > 2 * BOUND


def routed_tensors(kind: str) -> dict[str, Any]:
    """A tiny Mixtral whose routers know the tokens and keep their scores apart.

    A router of random numbers has scores so close that rounding sends a row to other experts.
    """
    given = expert_tensors(lambda array: encoded(kind)("", array))
    _, shape, raw = given["token_embd.weight"]
    table = np.frombuffer(raw, np.float32).reshape(shape)
    for layer in range(3):
        name = f"blk.{layer}.ffn_gate_inp.weight"
        router = np.zeros(given[name][1], np.float32)
        for place, token in enumerate(PROMPT + REST):
            first = FIRST[token, layer]
            router[first] += table[token] / 48
            router[(first + 1 + (place + layer) % 7) % 8] += table[token] / 64
        given[name] = (0, router.shape, router.tobytes())
    return given


def routed_logits(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, float]:
    """Logits in float32; the least distance of a chosen expert's score from the next one's."""
    gaps: list[float] = []

    def noting(scores: mx.array, top_k: int, *arguments: Any, **options: Any) -> Any:
        ranked = np.sort(np.array(scores), axis=-1)[:, ::-1]
        gaps.extend(ranked[:, top_k - 1] - ranked[:, top_k])
        return route_reference(scores, top_k, *arguments, **options)

    with mx.stream(mx.cpu), monkeypatch.context() as patch:
        patch.setattr(moe, "route_reference", noting)
        return logits(load_on(path, patch, on_cpu=True)), min(gaps)


def bound(path: Path, gpu: GpuTarget, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file's model with a GPU's bodies."""
    model = load_on(path, monkeypatch, on_cpu=False)
    bind_units(model, GpuKernels(gpu, KernelPolicy()))
    assert model.embed(mx.array([3])).dtype == mx.bfloat16
    return model


def assert_near(model: Any, wanted: np.ndarray) -> None:
    assert largest_share(logits(model), wanted) < BOUND


def largest_share(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference as a part of the largest logit."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def load_on(path: Path, monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool) -> Any:
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("turbospark.") and name != "turbospark.kernels.gpu.kernel"
        if is_ours and hasattr(module, "on_cpu"):
            monkeypatch.setattr(module, "on_cpu", lambda: on_cpu)
    return load_model(path, policy=REFERENCE).model

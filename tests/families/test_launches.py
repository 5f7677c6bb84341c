"""How many launches a decode step takes on a GPU: of bodies, and of MLX's own operations.

A graph is built for a target that computes nothing, and its nodes are counted: what the host pays
for a step is the number of its launches.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.loading.build import load_model
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel
from turbospark.settings import KernelPolicy
from turbospark.testing.synthetic import synthetic

GEMMA4_INPUTS = {
    "model_type": "gemma4",
    "hidden_size_per_layer_input": 64,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 512,
}
DEEPSEEK_WIDE = {
    "model_type": "deepseek_v2",
    "q_lora_rank": 64,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
STEPS: dict[str, tuple[dict[str, Any], int, int]] = {
    "gemma4 dense": ({"kind": "dense"}, 20, 6),
    "gemma4 moe": ({"kind": "moe"}, 44, 0),
    "gemma4 inputs": (GEMMA4_INPUTS, 39, 20),
    "deepseek_v2 wide": (DEEPSEEK_WIDE, 26, 0),
} | {
    name: ({"model_type": name}, most, 0)
    for name, most in {
        "llama": 11,
        "mistral": 11,
        "qwen2": 11,
        "qwen3": 11,
        "qwen3_moe": 20,
        "mixtral": 20,
        "gemma3": 11,
        "gpt_oss": 20,
        "deepseek_v2": 23,
        "qwen3_5": 14,
        "qwen3_5_moe": 26,
        "muse_glimmer": 18,
        "spark2_5": 18,
    }.items()
}
"""What is built; the most launches of bodies that a step takes, and of MLX's own operations."""

LARGE = {"muse_glimmer": (5, 4), "gemma3": (3, 3)}
"""Models whose layers are too large for a chain: layers, and launches besides five for each."""

VIEWS = {
    *("Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Full", "Reshape"),
    *("Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
}
"""Nodes that launch nothing; `Full` is the result of a body here."""


def counting(launched: list[str]) -> GpuTarget:
    """A target with all of CUDA's bodies that answers zeros and notes what is asked for.

    What nobody reads of that is never launched, so launches are counted in the graph: each is one
    node `Depends`.
    """

    def build(name: str, **_names: Any) -> Callable[..., Sequence[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            launched.append(name)
            pairs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return mx.depends([mx.zeros(shape, dtype) for shape, dtype in pairs], call["inputs"])

        return launch

    return GpuTarget("counting", "cuda.h", build, "cuda")


def fake_norm(x: mx.array, _weight: mx.array | None, _eps: float) -> mx.array:
    """One node, as on a GPU; on a CPU MLX makes several."""
    return mx.cumsum(x, axis=-1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations keep the type of the weights."""
    monkeypatch.setattr(mx.fast, "rms_norm", fake_norm)
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("turbospark.") and name != "turbospark.kernels.gpu.kernel"
        if is_ours and hasattr(module, "on_cpu"):
            monkeypatch.setattr(module, "on_cpu", lambda: False)


def operations(outputs: list[mx.array], file: Path) -> Counter[str]:
    """MLX's own launches in the graph behind some arrays, by name."""
    mx.export_to_dot(str(file), *outputs)
    nodes = re.findall(r'label ?="(\w+)", shape=rectangle', file.read_text())
    return Counter(node for node in nodes if node not in VIEWS)


def evaluated(caches: list[Any], *outputs: mx.array) -> None:
    for cache in caches:
        if cache.recurrent:
            mx.eval(cache.state)
        else:
            tail = cache.rows().tail
            mx.eval(tail.k, tail.v)
    mx.eval(outputs)


def step(folder: Path, rows: int, disable: str = "") -> tuple[list[str], Counter[str]]:
    """What a step of a model asks bodies for; the launches in its graph."""
    model = load_model(folder, policy=KernelPolicy(kernels="reference")).model
    asked: list[str] = []
    bind_units(model, GpuKernels(counting(asked), KernelPolicy(disable_kernels=disable)))
    caches = model.make_caches(300, 128)
    tokens = mx.arange(rows)
    evaluated(caches, model(mx.arange(20), caches, phase=Phase.PREFILL).logits)
    # Arrays that bodies prepare when they first run are no part of later steps.
    evaluated(caches, model(tokens, caches, phase=Phase.DECODE).logits)
    asked.clear()
    output = CompiledModel(model)(tokens, caches, phase=Phase.DECODE)
    launches = operations([output.logits], folder / "graph.dot")
    del launches["Concatenate"]  # of the lengths of a first step
    return asked, launches


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_few_launches(name: str, rows: int, tmp_path: Path) -> None:
    values, most, most_operations = STEPS[name]
    asked, launches = step(synthetic(tmp_path / "model", **values), rows)
    assert 0 < launches.pop("Depends") <= most, Counter(asked)
    assert launches.total() <= most_operations, launches


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", LARGE)
def test_norms_behind_products_take_no_launches(name: str, rows: int, tmp_path: Path) -> None:
    layers, besides = LARGE[name]
    folder = synthetic(tmp_path / "model", model_type=name)
    asked, launches = step(folder, rows, "int4_chain")
    last_sum = int(rows > 1)  # of several rows the head reads one
    assert launches == {"Depends": 5 * layers + besides - 1 + last_sum}, Counter(asked)
    asked, launches = step(folder, rows, "int4_chain,fused_residual")
    assert launches == {"Depends": 7 * layers + besides - 1}, Counter(asked)

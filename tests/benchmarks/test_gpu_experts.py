"""Layers of experts of every family that has them, in bodies, against mlx-lm's."""

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from benchmarks.graphs import chained, counting
from benchmarks.test_gpu_models import BENCHMARKS, narrowed
from kernels.cases_gpu import EMULATION
from metal_emu import require_emulator

from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

MODULES = ("gpu_experts", "gpu_models", "gpu_shapes", "gpu_timing", "gpu_links")
SHAPES = (
    "qwen3_5-35B-A3B", "gemma4-26B-A4B", "qwen3-30B-A3B", "gpt-oss-20B", "deepseek-v2-lite",
)  # fmt: skip


@pytest.fixture(scope="module")
def modules() -> Iterator[list[Any]]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield [importlib.import_module(name) for name in MODULES]
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_runs_in_bodies_and_agrees_with_mlx_lm(modules: list[Any], name: str) -> None:
    require_emulator()
    experts, models, shapes, *_ = modules
    config = narrowed(shapes, name)
    pair = models.build_pair(config, mx.float32)
    bind_units(pair.ours, GpuKernels(EMULATION, KernelPolicy()))
    layer = experts.layers_of(pair, config)[0]
    h = mx.random.normal((3, 256), key=mx.random.key(5))
    theirs = layer.theirs(h)
    assert layer.unit._block is not None
    assert layer.unit._block(h, True, Phase.DECODE) is not None
    bound = 2e-4 * mx.abs(theirs).max().item()
    for form in (layer.whole, layer.apart):
        assert mx.abs(form(h) - theirs).max().item() < bound


@pytest.fixture
def on_counting(modules: list[Any], monkeypatch: pytest.MonkeyPatch) -> GpuTarget:
    """Two layers of the models on a target that computes nothing."""
    experts, models, _, timing, _ = modules
    target = counting()
    monkeypatch.setattr(models, "choose_kernels", lambda policy: GpuKernels(target, policy))
    monkeypatch.setattr(timing, "_target", lambda _: target)
    monkeypatch.setattr(timing, "_copy_tb_s", lambda: 1.0)
    monkeypatch.setattr(experts, "Busy", lambda: None)
    monkeypatch.setattr(experts, "LAYERS", 2)
    return target


@pytest.fixture(params=["gpt-oss-20B", "gemma4-26B-A4B"])
def shape(
    request: pytest.FixtureRequest, modules: list[Any], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The only shape, narrowed."""
    experts, _, shapes, *_ = modules
    monkeypatch.setattr(experts, "SHAPES", {request.param: narrowed(shapes, request.param)})
    return request.param


@pytest.mark.parametrize("part", ["scores", "up", "down"])
@pytest.mark.parametrize("rows", [1, 4])
def test_each_launch_of_a_chain_waits_for_the_one_before(
    modules: list[Any],
    on_counting: GpuTarget,
    shape: str,
    part: str,
    rows: int,
    tmp_path: Path,
) -> None:
    experts, _, _, timing, _ = modules
    made = experts.launches_of(experts.build_layers(shape), on_counting)
    h = mx.random.normal((rows, 256)).astype(mx.bfloat16)
    mx.eval(h)
    call, start = experts.linked(made, part, h)
    chain = timing.Chain(call, start, experts.CALLS)
    launches, nodes = chained(chain, tmp_path)
    assert launches == (experts.CALLS, experts.CALLS)
    assert nodes == launches[0]  # nothing else is computed
    assert call(start, 0).dtype == start.dtype


def test_layers_of_a_chain_wait_for_each_other(
    modules: list[Any],
    on_counting: GpuTarget,
    shape: str,
    tmp_path: Path,
) -> None:
    experts, _, _, timing, _ = modules
    layers = experts.build_layers(shape)
    h = mx.random.normal((1, 256)).astype(mx.bfloat16)
    chain = timing.Chain(partial(experts._turn, layers, "whole"), h, experts.CALLS)
    of_a_layer = 4 if shape.startswith("gemma4") else 3
    assert chained(chain, tmp_path)[0] == (of_a_layer * experts.CALLS,) * 2


@pytest.mark.parametrize("part", ["scores", "up", "down"])
def test_a_link_changes_no_result(modules: list[Any], part: str) -> None:
    require_emulator()
    experts, models, shapes, _, links = modules
    config = narrowed(shapes, "gpt-oss-20B")
    pair = models.build_pair(config, mx.float32)
    bind_units(pair.ours, GpuKernels(EMULATION, KernelPolicy()))
    layers = experts.layers_of(pair, config)
    made = experts.launches_of(layers, EMULATION)
    h = mx.random.normal((3, 256), key=mx.random.key(5))
    given = [h]
    if part != "scores":
        scores = made[0].scores(h)
        given.append(scores if part == "up" else made[0].up(h, scores))
    plain = getattr(made[0], part)(*given)
    call, start = experts.linked(made, part, h)
    assert mx.array_equal(call(call(start, 1), 0), plain).item()
    assert isinstance(made[0].links, links.Links)


@pytest.mark.usefixtures("on_counting")
def test_cuts_and_words_are_measured(
    modules: list[Any],
    shape: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experts, _, _, timing, _ = modules
    bench, chosen = timing.Bench(600.0), experts.experts_mix.up_geometry
    experts.cuts(bench, (1, 4), (shape,))
    experts.words(bench, (shape,))
    told = capsys.readouterr().out.splitlines()[1:]
    assert told[0].startswith(f"{shape}: a layer of 1 rows")
    for part, count in (("down", len(experts.DOWN_CUTS)), ("up  ", len(experts.UP_CUTS))):
        lines = [line for line in told if f" {part} " in line and "columns" in line]
        assert len(lines) >= count
        assert sum("(default)" in line for line in lines) == 1
        assert all("1 rows" in line and "4 rows" in line for line in lines)
    assert sum(" words: up" in line for line in told) == len(experts.WORDS)
    assert experts.experts_mix.up_geometry is chosen


def test_every_shape_is_measured(modules: list[Any]) -> None:
    assert set(modules[0].NAMES) == set(SHAPES)

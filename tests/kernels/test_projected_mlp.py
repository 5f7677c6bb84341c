"""The second half of a dense layer as a unit: when it is one launch, and what runs else."""

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import resolve
from kernels.int4_emulation import int4_emulation
from kernels.matrices import quantized, rows
from mlx import nn

from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.step_zeros import StepZeros
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.target import KernelSet
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.projected_mlp import ProjectedMLP
from turbospark.nn.projections import NormedProjections, ProjectedResidual
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

C, INNER, WIDTH = 192, 320, 128


def linear(outputs: int, inputs: int, seed: int) -> Linear:
    module = Linear(inputs, outputs)
    module.assign(quantized(outputs, inputs, 4, 64, scale_dtype=mx.float16, seed=seed)[0])
    return module


class Layer(nn.Module):
    """A layer whose mixer is a projection."""

    def __init__(self, *, post_norms: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = RMSNorm(C, 1e-5), RMSNorm(C, 1e-5)
        self.mix_proj, self.o_proj = linear(WIDTH, C, seed + 1), linear(C, WIDTH, seed + 2)
        self.project = NormedProjections(self.first, [self.mix_proj])
        self.third = RMSNorm(C, 1e-5) if post_norms > 0 else None
        self.fourth = RMSNorm(C, 1e-5) if post_norms > 1 else None
        self.output = ProjectedResidual(self.o_proj, self.third)
        self.mlp = MLP(C, INNER, self.second, activation="silu", post_norm=self.fourth)
        for i, part in enumerate(self.mlp.step.parts):
            part.assign(linear(*part.value.shape, seed + 3 + i).value)
        self.finish = ProjectedMLP(self.output, self.mlp)

    def __call__(self, h: mx.array, phase: Phase, *, is_projected: bool = True) -> mx.array:
        read = h if is_projected else h + 0.0
        return self.finish(self.project(read, phase)[0], h, phase)


def run(
    kernels: KernelSet,
    count: int = 3,
    phase: Phase = Phase.DECODE,
    *,
    is_projected: bool = True,
    post_norms: int = 0,
) -> np.ndarray:
    layer = Layer(post_norms=post_norms)
    bind_units(layer, kernels)
    h = rows(count, C).astype(mx.float16)
    made = layer(h, phase, is_projected=is_projected)
    return np.array(made.astype(mx.float32))


def assert_alike(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() < 3e-3 * np.abs(wanted).max()


def on_emulation(launched: list[str], disable: str = "") -> GpuKernels:
    return GpuKernels(int4_emulation(launched=launched), KernelPolicy(disable_kernels=disable))


@pytest.mark.parametrize("post_norms", [0, 2])
@pytest.mark.parametrize("count", [1, 8])
def test_a_few_rows_finish_a_layer_in_one_launch(count: int, post_norms: int) -> None:
    launched: list[str] = []
    found = run(on_emulation(launched), count, post_norms=post_norms)
    assert launched == ["int4_mma_1_zeros", "int4_chain_2"]
    assert_alike(found, run(ReferenceKernels(), count, post_norms=post_norms))


@pytest.mark.parametrize(
    "options",
    [
        {"count": 9},
        {"phase": Phase.PREFILL},
        {"is_projected": False},
        {"post_norms": 1},
    ],
    ids=["nine rows", "prefill", "other rows", "one post norm"],
)
def test_what_the_launch_does_not_serve_runs_in_parts(options: dict[str, Any]) -> None:
    launched: list[str] = []
    found = run(on_emulation(launched), **options)
    assert not any(name.startswith("int4_chain") for name in launched)
    assert_alike(found, run(ReferenceKernels(), **options))


@pytest.mark.parametrize("name", ["int4_chain", "int4_mma", "fused_projections"])
def test_a_disabled_body_leaves_the_layer_in_parts(name: str) -> None:
    launched: list[str] = []
    found = run(on_emulation(launched, name))
    assert not any(built.startswith(("int4_chain", "int4_mma_1_zeros")) for built in launched)
    assert_alike(found, run(ReferenceKernels()))


def test_a_refused_launch_gives_way_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    emulation = int4_emulation()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if names["name"].startswith("int4_chain"):
            raise RuntimeError("too many resources")
        return emulation.builder(**names)

    target = GpuTarget("cuda", "metal.h", build, "cuda")
    kernels = GpuKernels(target, KernelPolicy())
    weights = [
        linear(*shape, 5).value for shape in [(C, WIDTH), (INNER, C), (INNER, C), (C, INNER)]
    ]
    norm = RMSNorm(C, 1e-5).value
    assert kernels.projected_mlp(weights, [None] * 4, norm, "silu", None) is None
    assert "int4_chain cannot run for 128 to 192 to 320 values, three launches do" in caplog.text
    assert len(caplog.records) == 1
    assert kernels.projected_mlp(weights, [None] * 4, norm, "silu", None) is None
    assert len(caplog.records) == 1


def test_the_parts_share_the_bundle_of_the_whole() -> None:
    kernels = on_emulation([])
    layer = Layer()
    bind_units(layer, kernels)
    assert layer.finish.body == "emulation"
    assert layer.o_proj.value.codes.shape == (C, WIDTH // 8)
    h = rows(2, C).astype(mx.float16)
    whole, in_parts = layer(h, Phase.DECODE), layer(h, Phase.DECODE, is_projected=False)
    assert_alike(*(np.array(y.astype(mx.float32)) for y in (whole, in_parts)))


@pytest.mark.cuda
def test_compiled_layers_of_two_threads_keep_their_counts_apart() -> None:
    target = resolve("cuda")
    assert target is not None
    whole, parts = ([Layer(seed=10 * i) for i in range(3)] for _ in range(2))
    for layers, disable in ((whole, ""), (parts, "int4_chain")):
        kernels = GpuKernels(target, KernelPolicy(disable_kernels=disable))
        for layer in layers:
            bind_units(layer, kernels)
            assert (layer.finish.body == "cuda") == (not disable)

    def steps(layers: list[Layer], seed: int) -> list[mx.array]:
        def step(h: mx.array) -> mx.array:
            for layer in layers:
                h = layer(h, Phase.DECODE) * 1e-3
            return h

        with mx.stream(mx.new_stream(mx.default_device())):
            h, run = rows(1 + seed % 8, C, seed=seed).astype(mx.float16), mx.compile(step)
            made = [h := run(h) for _ in range(40)]
            mx.eval(made)
        return made

    wanted = [steps(parts, seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda seed: steps(whole, seed), range(2)))
    for ours, theirs in zip(found, wanted, strict=True):
        first, other = (np.array(y[0].astype(mx.float32)) for y in (ours, theirs))
        assert_alike(first, other)
        assert all(mx.isfinite(y).all().item() for y in ours)
        again = steps(whole, 0 if ours is found[0] else 1)
        assert all(mx.array_equal(one, two).item() for one, two in zip(ours, again, strict=True))


def test_zeros_are_taken_once_and_only_with_their_rows() -> None:
    zeros, h = StepZeros(), mx.zeros((1, 8))
    zeros.put(h, mx.array([1]))
    assert zeros.take(mx.zeros((1, 8))) is None
    assert zeros.take(h) is not None
    assert zeros.take(h) is None


def test_zeros_go_with_their_rows() -> None:
    zeros, h = StepZeros(), mx.zeros((1, 8))
    zeros.put(h, mx.array([1]))
    del h
    gc.collect()
    assert not zeros._written


def test_a_layer_without_bodies_says_that_its_parts_run() -> None:
    layer = Layer()
    counts = bind_units(layer, ReferenceKernels())
    assert counts["ProjectedMLP its parts"] == 1

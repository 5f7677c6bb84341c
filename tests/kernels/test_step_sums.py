"""Sums of the stream that the product behind them forms: in emulation and on CUDA."""

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import resolve
from kernels.cases_gpu_int4_product import BRAIN, HALF, WIDE, ProductCase
from kernels.int4_emulation import int4_emulation
from kernels.matrices import quantized, rows
from metal_emu import MetalRunError
from mlx import nn

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.int4_mma import Geometry, fits, int4_mma
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.gpu.step_sums import StepSums, StreamSum, factors_of
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.target import KernelSet
from turbospark.kernels.weights import Norm
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.projections import NormedProjections, ProjectedResidual
from turbospark.nn.sandwich import SandwichLayer
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

TARGETS = ["emulation", pytest.param("cuda", marks=pytest.mark.cuda)]
POST = Norm(None, 1e-2)

CASES = [
    ProductCase(1, (37, 21), 192, 64, BRAIN, BRAIN, norm="norm"),
    ProductCase(2, (19,), 704, 64, HALF, HALF, norm="norm", softcap=2.5, out=WIDE),
    ProductCase(3, (35, 35), 2112, 64, BRAIN, WIDE, norm="norm", activation="silu", bias=(1,)),
    ProductCase(4, (11, 19, 5, 34), 512, 64, HALF, BRAIN, norm="bare"),
    ProductCase(5, (23, 23), 4160, 64, BRAIN, BRAIN, norm="norm", activation="gelu_tanh"),
    ProductCase(6, (33,), 64, 64, HALF, HALF, norm="norm", zero=True),
    ProductCase(7, (18, 9), 320, 64, BRAIN, BRAIN, norm="bare"),
    ProductCase(8, (21,), 6656, 64, BRAIN, BRAIN, norm="norm"),
]


@dataclass(frozen=True)
class Sides:
    """The two ways to a product: with the sum in the same launch, and behind it."""

    together: list[mx.array]
    apart: list[mx.array]

    def are_equal(self) -> bool:
        pairs = zip(self.together, self.apart, strict=True)
        return all(mx.array_equal(one, two).item() for one, two in pairs)


def target_of(name: str) -> GpuTarget:
    target = unwritten(int4_emulation()) if name == "emulation" else resolve(name)
    assert target is not None
    return target


def unwritten(target: GpuTarget) -> GpuTarget:
    """The target, with outputs that hold NaN until a body writes them."""

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        return functools.partial(target.builder(**names), init_value=float("nan"))

    return replace(target, builder=build)


def parts_of(case: ProductCase) -> StreamSum:
    weight = rows(1, case.K, seed=9)[0] + 1.5
    factors = factors_of(Norm(weight, POST.eps))
    assert factors is not None
    return StreamSum(case.x(), rows(case.M, case.K, seed=3).astype(case.dtype), factors)


def both(case: ProductCase, target: GpuTarget, zeros: int = 0) -> Sides:
    product, parts = case.product(), parts_of(case)
    norm = Norm(parts.norm[: case.K], POST.eps)
    h = rms_norm(parts.branch, norm, parts.stream, target=target)
    together = int4_mma(product, parts.branch, None, target, zeros=zeros, parts=parts)
    return Sides(together, [*int4_mma(product, h, None, target, zeros=zeros), h])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_of_a_sum_has_the_bits_of_two_launches(case: ProductCase, target: str) -> None:
    assert both(case, target_of(target)).are_equal()


@pytest.mark.parametrize("order", [1, 7])
def test_threads_may_take_turns_in_any_order(order: int) -> None:
    assert both(CASES[3], int4_emulation(order=order), zeros=128).are_equal()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [CASES[4], CASES[6]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: ProductCase, target: str) -> None:
    gpu, product, parts = target_of(target), case.product(), parts_of(case)
    together = int4_mma(product, parts.branch, None, gpu, parts=parts)
    for m in (0, case.M - 1):
        own = replace(parts, branch=parts.branch[m : m + 1], stream=parts.stream[m : m + 1])
        alone = int4_mma(product, own.branch, None, gpu, parts=own)
        assert all(
            mx.array_equal(y[m : m + 1], row).item() for y, row in zip(together, alone, strict=True)
        )


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (CASES[0], "base.ask(stream, threadIdx.x)", "base.ask(x, threadIdx.x)"),
        (CASES[1], "summed + at", "summed + at % K"),
        (CASES[2], "values_of<X>(words)", "values_of<X>(in_code_order(words))"),
        (CASES[3], "blockIdx.x == 0", "blockIdx.x == 100"),
        (CASES[4], "NORM ? numbers[0] : 0.0f", "branch_norm[K]"),
        (CASES[4], "base.load(stream, first + 256 * PARTS_COUNT);", ""),
        (CASES[6], "store_shared(at, ordered);", "store_shared(at, sum);"),
    ],
    ids=["stream", "row", "order", "writer", "eps", "chunk", "staged order"],
)
def test_a_planted_mistake_is_caught(case: ProductCase, old: str, new: str) -> None:
    target = int4_emulation(
        old=old, new=new, mutated=f"{case.product().kernel('int4_mma').name}_sum"
    )
    try:
        sides = both(case, unwritten(target))
    except MetalRunError:
        return
    assert not sides.are_equal()


@pytest.mark.parametrize("rows_of_x", range(1, 9))
@pytest.mark.parametrize("is_pair", [False, True])
def test_wide_rows_have_room(rows_of_x: int, is_pair: bool) -> None:
    w = quantized(16, 6656, 4, 64, scale_dtype=BRAIN)[0]
    weights = (w, w) if is_pair else (w,)
    product = Int4Product(weights, (None,) * len(weights), Norm(None, 1e-5))
    if is_pair:
        product = replace(product, activation="silu")
    assert fits(product, rows_of_x, Geometry(8, 4, 2, 1, True))


def test_parts_of_another_shape_are_refused() -> None:
    case = CASES[0]
    product, parts, target = case.product(), parts_of(case), int4_emulation()
    x = parts.branch
    with pytest.raises(ShapeError, match="a stream like it"):
        int4_mma(product, x, None, target, parts=replace(parts, stream=parts.stream[:, :64]))
    with pytest.raises(ShapeError, match="and an eps"):
        int4_mma(product, x, None, target, parts=replace(parts, norm=parts.norm[: case.K]))
    with pytest.raises(ShapeError, match="in front of a norm"):
        int4_mma(replace(product, norm=None), x, None, target, parts=parts)


C, INNER, WIDTH = 192, 320, 128


class Mixer(nn.Module):
    """In an attention's place: a product of the normed stream."""

    def __init__(self, norm: RMSNorm, post: RMSNorm) -> None:
        super().__init__()
        self.mix_proj, self.o_proj = Linear(C, WIDTH), Linear(WIDTH, C)
        self.project = NormedProjections(norm, [self.mix_proj])
        self.output = ProjectedResidual(self.o_proj, post)

    def __call__(self, h: mx.array, _cache: None, phase: Phase) -> mx.array:
        return self.project(h, phase)[0]


class Layers(nn.Module):
    """Two layers with norms behind their halves."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"activation": "silu", "eps": 1e-5, "post_eps": 1e-3}
        self.layers = [SandwichLayer(C, INNER, Mixer, **options) for _ in range(2)]
        for seed, (_, module) in enumerate(self.named_modules()):
            if isinstance(module, Linear):
                shape = module.value.shape
                module.assign(quantized(*shape, 4, 64, scale_dtype=HALF, seed=seed)[0])
            if isinstance(module, RMSNorm):
                module.weight = rows(1, C, seed=seed)[0] + 0.5

    def __call__(self, h: mx.array, phase: Phase) -> list[mx.array]:
        """The stream behind each layer."""
        return [h := layer(h, None, phase) for layer in self.layers]


def run(kernels: KernelSet, count: int, phase: Phase = Phase.DECODE) -> list[np.ndarray]:
    model = Layers()
    bind_units(model, kernels)
    return [np.array(h) for h in model(rows(count, C).astype(HALF), phase)]


def on_emulation(launched: list[str], disable: str) -> GpuKernels:
    target = int4_emulation(launched=launched)
    return GpuKernels(target, KernelPolicy(disable_kernels=disable))


@pytest.mark.parametrize("count", [1, 8])
def test_layers_with_sums_have_the_bits_of_layers_without(count: int) -> None:
    launched: list[str] = []
    found = run(on_emulation(launched, "int4_chain"), count)
    assert {"int4_mma_pair_sum", "int4_mma_1_sum"} <= {*launched}
    apart: list[str] = []
    wanted = run(on_emulation(apart, "int4_chain,fused_residual"), count)
    assert not any(name.endswith("_sum") for name in apart)
    reference = run(ReferenceKernels(), count)
    for y, other, plain in zip(found, wanted, reference, strict=True):
        np.testing.assert_array_equal(y, other)
        wide, rough = plain.astype(np.float32), y.astype(np.float32)
        assert np.abs(rough - wide).max() < 3e-3 * np.abs(wide).max()


def test_a_stream_that_is_steered_and_watched_between_layers_is_read_as_it_is() -> None:
    made = []
    for disable in ("int4_chain", "int4_chain,fused_residual"):
        launched: list[str] = []
        model = Layers()
        bind_units(model, on_emulation(launched, disable))
        first, second = model.layers
        seen = first(rows(2, C).astype(HALF), None, Phase.DECODE)
        steered = seen + rows(2, C, seed=7).astype(HALF)
        y = second(steered, None, Phase.DECODE)
        made.append(np.array(mx.concatenate([seen, y, second(seen, None, Phase.DECODE)])))
        assert any(name.endswith("_sum") for name in launched) is (disable == "int4_chain")
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize(
    ("count", "phase", "disable"),
    [
        (9, Phase.DECODE, "int4_chain"),
        (2, Phase.PREFILL, "int4_chain"),
        (2, Phase.DECODE, "int4_chain,int4_mma"),
        (2, Phase.DECODE, "int4_chain,rms_norm"),
        (2, Phase.DECODE, "int4_chain,fused_projections,fused_gate_up"),
    ],
)
def test_sums_are_formed_at_once_for_other_rows(count: int, phase: Phase, disable: str) -> None:
    launched: list[str] = []
    found = run(on_emulation(launched, disable), count, phase)
    assert not any(name.endswith("_sum") for name in launched)
    assert all(np.isfinite(y).all() for y in found)


def test_a_refused_launch_forms_no_sums(caplog: pytest.LogCaptureFixture) -> None:
    emulation = int4_emulation()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if names["name"].endswith("_sum"):
            raise RuntimeError("too many resources")
        return emulation.builder(**names)

    target = GpuTarget("cuda", "metal.h", build, "cuda")
    policy = KernelPolicy(disable_kernels="int4_chain,dense_prefill")
    found = run(GpuKernels(target, policy), 2)
    wanted = run(on_emulation([], "int4_chain,fused_residual"), 2)
    np.testing.assert_array_equal(found, wanted)
    assert "int4_mma cannot run for 320+320 columns of 192 values" in caplog.text


def test_a_sum_is_known_by_its_array_alone() -> None:
    sums, h, written = StepSums(), mx.zeros((1, 8)), mx.ones((1, 8))
    parts = StreamSum(h, h, mx.zeros((9,)))
    assert sums.written(h) is h
    sums.put(h, parts)
    assert sums.parts(h) is parts
    assert sums.parts(mx.zeros((1, 8))) is None
    assert sums.written(h) is h
    sums.put(h, written)
    assert sums.parts(h) is None
    assert sums.written(h) is written


def test_a_sum_goes_with_its_array() -> None:
    sums, h, branch = StepSums(), mx.zeros((1, 8)), mx.zeros((1, 8))
    sums.put(h, StreamSum(branch, branch, branch))
    del h
    gc.collect()
    assert not sums._known

"""Products on tensor cores in emulation: every cut, and rows at any address."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from kernels.cases_gpu_chain import ChainCase
from kernels.cases_gpu_int4_product import BRAIN, CASES, HALF, TOLERANCE, WIDE, ProductCase
from kernels.cuda_source import noting
from kernels.int4_emulation import int4_emulation
from kernels.matrices import quantized, rows
from kernels.placed import placed
from metal_emu import MetalRunError

from turbospark.kernels.gpu.int4_chain import ChainGeometry
from turbospark.kernels.gpu.int4_mma import Geometry, choose_geometry, fits, int4_mma, takes
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.step_sums import StreamSum, factors_of
from turbospark.kernels.weights import Norm

READ = ("x", "stream", "norm_weight", "branch_norm")
ADDRESSES = [
    ProductCase(3, (19, 9), 2112, 64, BRAIN, WIDE),
    ProductCase(5, (21,), 4160, 64, HALF, HALF, norm="norm"),
    ProductCase(2, (11, 5), 2112, 64, BRAIN, BRAIN, norm="bare"),
]
SUMMED = ProductCase(3, (19, 9), 2112, 64, BRAIN, BRAIN, norm="norm")


def run(case: ProductCase, target: GpuTarget, *, summed: bool) -> list[mx.array]:
    if not summed:
        return int4_mma(case.product(), case.x(), case.added(), target)
    factors = factors_of(Norm(rows(1, case.K, seed=9)[0] + 1.5, 1e-2))
    assert factors is not None
    parts = StreamSum(case.x(), rows(case.M, case.K, seed=3).astype(case.dtype), factors)
    return int4_mma(case.product(), parts.branch, None, target, parts=parts)


def are_equal(one: list[mx.array], other: list[mx.array]) -> bool:
    return all(mx.array_equal(*pair).item() for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("case", [case.in_groups_of_64() for case in CASES], ids=str)
def test_a_form_equals_its_composition(case: ProductCase) -> None:
    product, x = case.product(), case.x()
    if product.norm is not None:  # whose rows are rounded before they are multiplied
        wide = mx.fast.rms_norm(x.astype(WIDE), product.norm.weight, product.norm.eps)
        product, x = replace(product, norm=None), wide.astype(case.dtype)
    wanted = product.reference(x, case.added())
    for y, exact in zip(run(case, int4_emulation(), summed=False), wanted, strict=True):
        assert y.shape == exact.shape
        error = mx.abs(y.astype(WIDE) - exact.astype(WIDE)).max() / mx.abs(exact).max()
        assert error < TOLERANCE[case.dtype]


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("case", "summed"), [*((case, False) for case in ADDRESSES), (SUMMED, True)], ids=str
)
def test_addresses_do_not_change_a_bit(case: ProductCase, summed: bool, before: int) -> None:
    wanted = run(case, int4_emulation(), summed=summed)
    assert are_equal(run(case, placed(int4_emulation(), READ, before), summed=summed), wanted)


@pytest.mark.parametrize(
    ("before", "old"),
    [
        (0, "rows.ask(x, threadIdx.x);"),
        (0, "factor.ask(norm_weight, threadIdx.x);"),
        (0, "base.ask(stream, threadIdx.x);"),
        (0, "branch_factor.ask(branch_norm, threadIdx.x);"),
        (1, "rows.take(x, index);"),
        (1, "factor.take(norm_weight, index);"),
        (1, "base.take(stream, index);"),
        (1, "branch_factor.take(branch_norm, index);"),
        (1, "take(x, first);"),
        (0, "ask(x, first);"),
    ],
)
def test_a_load_that_is_left_out_is_caught(before: int, old: str) -> None:
    target = int4_emulation(old=old, new="", mutated="int4_mma")
    try:
        found = run(SUMMED, placed(target, READ, before), summed=True)
    except MetalRunError:
        return
    assert not are_equal(found, run(SUMMED, int4_emulation(), summed=True))


@pytest.mark.parametrize("M", [1, 3, 8])
@pytest.mark.parametrize("cut", [(2, True, 1), (3, True, 2), (2, False, 2), (4, False, 1)])
def test_a_cut_does_not_change_a_bit(cut: tuple[int, bool, int], M: int) -> None:
    stages, staged, tall = cut
    case = ProductCase(M, (37, 19), 1088, 64, BRAIN, BRAIN)
    chosen = choose_geometry(case.product(), M)
    other = Geometry(chosen.warps, chosen.step, stages, 1, staged, tall)
    wanted, target = run(case, int4_emulation(), summed=False), int4_emulation()
    assert are_equal(int4_mma(case.product(), case.x(), None, target, other), wanted)


def test_names_and_templates_tell_apart_what_is_bounded_otherwise() -> None:
    """MLX finds a built kernel by them alone."""
    built: list[tuple[str, object, str]] = []

    def note(names: dict[str, Any], call: dict[str, Any]) -> None:
        built.append((names["name"], frozenset(call["template"]), names["header"]))

    target, case = noting(note), ADDRESSES[1]
    for blocks in (1, 2, 3):
        int4_mma(case.product(), case.x(), None, target, Geometry(8, 4, 2, blocks, True))
    for blocks in (1, 2):
        ChainCase(1, 192, 320, 448, cut=ChainGeometry(2, blocks)).run(target)
    assert len({(name, template) for name, template, _ in built}) == len(built) == 5
    bounds = ["#define RESIDENT 256, 2\n" in header for *_, header in built]
    assert bounds == [False, True, False, False, True]


@pytest.mark.parametrize("M", range(1, 9))
@pytest.mark.parametrize("K", [64, 2048, 2112, 4096, 6656, 7168, 14336])
def test_what_is_taken_has_a_cut_that_fits(K: int, M: int) -> None:
    for N in (64, 4096, 11_008, 151_936):
        w = quantized(1, K, 4, 64, scale_dtype=BRAIN)[0]
        w = replace(w, codes=mx.zeros((N, K // 8), mx.uint32), scales=mx.zeros((N, K // 64), BRAIN))
        for norm in (None, Norm(None, 1e-5)):
            single = Int4Product((w,), (None,), norm)
            for product in (single, replace(single, weights=(w, w), activation="silu")):
                if not takes(product, BRAIN):
                    continue
                for summed in {False, norm is not None}:
                    cut = choose_geometry(product, M, summed=summed)
                    assert fits(product, M, cut)
                    assert cut.staged or norm is None
                    assert cut.blocks < 3 or not summed

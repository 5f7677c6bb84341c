"""The second half of a layer in one launch: in emulation one block after another, and on CUDA."""

from dataclasses import replace

import mlx.core as mx
import pytest
from kernels.cases_gpu import resolve
from kernels.cases_gpu_chain import CASES, ChainCase, three_launches
from kernels.cases_gpu_int4_product import TOLERANCE
from kernels.int4_emulation import int4_emulation
from kernels.matrices import rows
from metal_emu import MetalRunError

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.int4_chain import (
    COUNTERS,
    Int4Chain,
    choose_geometry,
    fits,
    int4_chain,
    int4_chain_reference,
    is_faster,
)
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.weights import Norm, QuantizedWeight

TARGETS = ["emulation", pytest.param("cuda", marks=pytest.mark.cuda)]


def target_of(name: str) -> GpuTarget:
    target = int4_emulation() if name == "emulation" else resolve(name)
    assert target is not None
    return target


def error(case: ChainCase, y: mx.array) -> float:
    """Largest difference from float32 throughout, over the largest value."""
    wanted = int4_chain_reference(case.chain(), case.x(), case.residual()).astype(mx.float32)
    return float(mx.abs(y.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_chain_gives_the_bits_of_three_launches(case: ChainCase, target: str) -> None:
    gpu = target_of(target)
    y = case.run(gpu)
    assert (y.shape, y.dtype) == ((case.M, case.C), case.dtype)
    assert error(case, y) < 3 * TOLERANCE[case.dtype]  # two results are rounded on the way
    parts = three_launches(case.chain(), case.x(), case.residual(), gpu)
    if case.has_post_norms:  # whose squares are summed in another order
        assert mx.abs(y - parts).max() <= 2 * TOLERANCE[case.dtype] * mx.abs(parts).max()
    else:
        assert mx.array_equal(y, parts)


@pytest.mark.parametrize("order", [1, 7])
@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[7]], ids=str)
def test_one_block_alone_finishes_the_chain(case: ChainCase, order: int) -> None:
    y = case.run(int4_emulation(order=order, blocks=1))
    assert mx.array_equal(y, case.run(int4_emulation()))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [CASES[2], CASES[5], CASES[7]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: ChainCase, target: str) -> None:
    gpu, chain = target_of(target), case.chain()
    together = case.run(gpu)
    for m in (0, case.M - 1):
        x, residual = case.x()[m : m + 1], case.residual()[m : m + 1]
        alone = int4_chain(chain, x, residual, mx.zeros((COUNTERS,), mx.int32), gpu)
        assert mx.array_equal(together[m : m + 1], alone)


@pytest.mark.cuda
def test_many_chains_in_flight_give_the_same_bits() -> None:
    gpu, case = target_of("cuda"), ChainCase(3, 1088, 2048, 4160)
    chain, x, residual = case.chain(), case.x(), case.residual()
    zeros = [mx.zeros((COUNTERS,), mx.int32) for _ in range(64)]
    mx.eval(zeros)
    made = [int4_chain(chain, x, residual, counters, gpu) for counters in zeros]
    mx.eval(made)
    wanted = three_launches(chain, x, residual, gpu)
    assert all(mx.array_equal(y, wanted).item() for y in made)


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (CASES[0], "announce(counters + (phase + 1) * LINE, made)", "made = 0"),
        (CASES[5], "wait_for_copies<RING - SLICES>()", "wait_for_copies<RING>()"),
        (CASES[3], "used += SLICES;", "used += 1;"),
        (CASES[4], "static_cast<float>(hidden[m * C + n])", "0.0f"),
        (
            CASES[1],
            "result[matrix] += static_cast<float>(",
            "result[matrix] -= static_cast<float>(",
        ),
        (CASES[2], "extra = static_cast<float>(residual[m * C + n]);", "extra = 0.0f;"),
    ],
    ids=["announcement", "arrival", "ring", "stream", "bias", "residual"],
)
def test_a_planted_mistake_is_caught(case: ChainCase, old: str, new: str) -> None:
    try:
        y = case.run(int4_emulation(old=old, new=new))
    except MetalRunError:
        return
    assert not error(case, y) < 3 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("sizes", [(4096, 4096, 14336), (2048, 2048, 8192), (4096, 2560, 9216)])
@pytest.mark.parametrize("M", range(1, 9))
def test_every_width_of_rows_has_a_cut_that_fits(sizes: tuple[int, int, int], M: int) -> None:
    K, C, I = sizes  # noqa: E741
    weights = tuple(
        QuantizedWeight(
            mx.zeros((N, inner // 8), mx.uint32), mx.zeros((N, inner // 64), mx.bfloat16),
            mx.zeros((N, inner // 64), mx.bfloat16), 4, 64,
        )
        for N, inner in ((C, K), (I, C), (I, C), (C, I))
    )  # fmt: skip
    chain = Int4Chain(weights, (None,) * 4, Norm(None, 1e-6), "silu")
    cut = choose_geometry(chain, M)
    assert fits(chain, M, cut)
    assert cut.ring >= 4


def test_weights_that_do_not_follow_each_other_are_refused() -> None:
    case = CASES[0]
    chain, x, h = case.chain(), case.x(), case.residual()
    zeros = mx.zeros((COUNTERS,), mx.int32)
    turned = replace(chain, weights=chain.weights[:3] + chain.weights[1:2])
    target = int4_emulation()
    with pytest.raises(ShapeError, match="takes weights"):
        int4_chain(turned, x, h, zeros, target)
    with pytest.raises(ShapeError, match="takes a residual"):
        int4_chain(chain, x, h[:, :64], zeros, target)
    with pytest.raises(ShapeError, match="takes counters"):
        int4_chain(chain, x, h, zeros[:3], target)
    with pytest.raises(ShapeError, match="1 to 8 rows"):
        int4_chain(chain, rows(9, case.K), rows(9, case.C), zeros, target)
    with pytest.raises(ShapeError, match="int32 counters"):
        int4_chain(chain, x, h, zeros.astype(mx.float32), target)


def test_other_layers_have_no_chain() -> None:
    case = CASES[0]
    chain = case.chain()
    first = chain.weights[0]
    other = replace(first, scales=first.scales.astype(mx.float32))
    assert Int4Chain.build(chain.weights, chain.biases, None, "silu") is None
    mixed = (other, *chain.weights[1:])
    assert Int4Chain.build(mixed, chain.biases, chain.norm, "silu") is None
    dense = (rows(case.C, case.K), *chain.weights[1:])
    assert Int4Chain.build(dense, chain.biases, chain.norm, "silu") is None


@pytest.mark.parametrize(
    ("sizes", "wins"),
    [((2048, 2048, 8192), True), ((4096, 2560, 9216), False), ((4096, 4096, 14336), False)],
)
def test_large_weights_are_left_to_three_launches(sizes: tuple[int, int, int], wins: bool) -> None:
    K, C, inner = sizes
    weights: list[QuantizedWeight] = []
    for N, width in ((C, K), (inner, C), (inner, C), (C, inner)):
        scales = mx.zeros((N, width // 64), mx.bfloat16)
        codes = mx.zeros((N, width // 8), mx.uint32)
        weights.append(QuantizedWeight(codes, scales, scales, 4, 64))
    chain = Int4Chain(tuple(weights), (None,) * 4, Norm(None, 1e-6), "silu")
    assert is_faster(chain) == wins

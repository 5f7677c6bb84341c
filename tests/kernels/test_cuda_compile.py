"""Every body compiles for CUDA, without spills but where it is bounded and gains by them."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from kernels.cases_gpu_attention import AttentionCase
from kernels.cases_gpu_chain import CASES as CHAIN_CASES
from kernels.cases_gpu_chain import ChainCase
from kernels.cases_gpu_delta import DeltaCase
from kernels.cases_gpu_experts import ExpertCase
from kernels.cases_gpu_heads import CASES as HEAD_CASES
from kernels.cases_gpu_index import IndexCase
from kernels.cases_gpu_int4_gemv import GemvCase
from kernels.cases_gpu_int4_product import CASES, ProductCase
from kernels.cases_gpu_latent import LatentCase
from kernels.cases_gpu_rotated import CASES as ROTATED_CASES
from kernels.cuda_source import compile_source, recording, write_headers
from kernels.matrices import quantized, rows

from turbospark.kernels.gpu.argmax import argmax_rows
from turbospark.kernels.gpu.experts_scores import experts_scores, scores_of_sum
from turbospark.kernels.gpu.experts_wide import mix_sorted
from turbospark.kernels.gpu.int4_gemv import int4_gemv, vector_product
from turbospark.kernels.gpu.int4_mma import int4_mma
from turbospark.kernels.gpu.int4_rows import int4_rows
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.gpu.step_sums import StreamSum, factors_of
from turbospark.kernels.gpu.streams import streams_mix, streams_norm
from turbospark.kernels.target import DeltaGeometry
from turbospark.kernels.weights import Norm

HALF, BRAIN = mx.float16, mx.bfloat16
SPILLED = {"rotated_tensor": 32, "int4_mma_pair": 4}
"""Bytes that a thread may spill where registers are bounded so that several blocks fit."""


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    write_headers(folder)
    return folder


def gemv(case: GemvCase) -> Callable[[GpuTarget], object]:
    return lambda target: int4_gemv(case.x(), case.weight()[0], target=target)


def product(case: ProductCase, launch: Callable[..., object]) -> Callable[[GpuTarget], object]:
    return lambda target: launch(case.product(), case.x(), case.added(), target)


def bundled(case: ProductCase, launch: Callable[..., object]) -> Callable[[GpuTarget], object]:
    return lambda target: launch(case.product().bundled(), case.x(), case.added(), target)


def summed(case: ProductCase) -> Callable[[GpuTarget], object]:
    x, factors = case.x(), factors_of(Norm(mx.ones((case.K,)), 1e-6))
    assert factors is not None
    parts = StreamSum(x, x, factors)
    return lambda target: int4_mma(case.product(), x, None, target, parts=parts)


def norm(width: int, dtype: mx.Dtype) -> Callable[[GpuTarget], object]:
    x = rows(3, width).astype(dtype)
    return lambda target: rms_norm(x, Norm(x[0], 1e-6), target=target)


def streams(launch: Callable[..., object]) -> Callable[[GpuTarget], object]:
    h, y, shares = (rows(2, width).astype(BRAIN) for width in (4 * 2560, 2560, 4))
    if launch is streams_mix:
        return lambda target: streams_mix(h, h, shares, 4, target=target)
    return lambda target: streams_norm(h, (y, shares), Norm(h[0], 1e-6), target=target)


def attention(case: AttentionCase) -> Callable[[GpuTarget], object]:
    return case.run


def delta(T: int, key_dim: int, *, keep: int = 0) -> Callable[[GpuTarget], object]:
    case = DeltaCase(DeltaGeometry(2, 4, key_dim, 128, 4), T, BRAIN, BRAIN, is_stacked=True)

    def launch(target: GpuTarget) -> object:
        rows = case.run(replace(target, name="cuda"), record=keep > 0)[2]
        return None if rows is None else rows.replay(keep)

    return launch


def experts(case: ExpertCase) -> Callable[[GpuTarget], object]:
    return lambda target: case.run(replace(target, name="cuda"))


IN_BF16 = AttentionCase(1, (8, 2), 128, 300, 256, sealed=256, tail=128, dtype=BRAIN, kv_dtype=BRAIN)
IN_WINDOW = AttentionCase(8, (8, 2), 256, 300, 256, sealed=256, tail=128, window=90, sinks=True)
IN_THREE = ProductCase(8, (67, 9, 35), 4096, 64, BRAIN, BRAIN, norm="norm", bias=(1,))
IN_PAIR = ProductCase(1, (2051, 2051), 2560, 64, HALF, HALF, norm="norm", activation="silu")
IN_WIDE_PAIR = replace(IN_PAIR, K=6656, dtype=BRAIN, scale_dtype=BRAIN)
IN_WIDE_ROWS = ProductCase(8, (29,), 14336, 64, BRAIN, BRAIN, residual=True)
LAUNCHES = {
    "one row": gemv(GemvCase(1, 2051, 2560, 64, BRAIN, BRAIN)),
    "eight rows": gemv(GemvCase(8, 2051, 2560, 64, HALF, HALF)),
    "five rows of a small weight": gemv(GemvCase(5, 37, 96, 32, mx.float32, BRAIN, zero=True)),
    "three weights": product(IN_THREE, vector_product),
    "a pair": product(IN_PAIR, vector_product),
    "three weights on tensor cores": product(IN_THREE, int4_mma),
    "a pair on tensor cores": product(IN_PAIR, int4_mma),
    "a pair and gelu on tensor cores": product(replace(IN_PAIR, activation="gelu_erf"), int4_mma),
    "wide rows on tensor cores": product(IN_WIDE_ROWS, int4_mma),
    "three weights in a bundle": bundled(IN_THREE, int4_mma),
    "odd groups on tensor cores": product(CASES[2], int4_mma),
    "a pair of a sum": summed(IN_WIDE_PAIR),
    "three weights of eight sums": summed(IN_THREE),
    "odd groups of a sum": summed(CASES[2]),
    "a chain of one row": ChainCase(1, 4096, 320, 9216).run,
    "a chain of eight rows": ChainCase(8, 4096, 256, 14336, HALF, HALF).run,
    "a chain of odd groups": CHAIN_CASES[4].run,
    "a chain with norms behind": CHAIN_CASES[6].run,
    "what is said into residual streams, and their norms": streams(streams_norm),
    "a mixture of residual streams": streams(streams_mix),
    "rows of a block index": IndexCase(4, 128, 32, 4, 59, 58, BRAIN, is_stacked=True).run,
    "a delta net's row": delta(1, 128),
    "eight rows of a delta net, recorded and replayed": delta(8, 128, keep=3),
    "wide heads of a delta net": delta(2, 256),
    "many rows of a delta net": delta(40, 128),
    "experts": experts(
        ExpertCase(1, 16, 8, 2048, 512, 64, BRAIN, BRAIN, shared=512, gate="8 bits")
    ),
    "experts of odd widths": experts(
        ExpertCase(3, 12, 10, 320, 704, 64, HALF, HALF, "gelu_tanh", router="4 bits")
    ),
    "experts that are normed": experts(
        ExpertCase(
            8,
            16,
            8,
            2816,
            704,
            64,
            BRAIN,
            BRAIN,
            "gelu_tanh",
            shared=2112,
            closes=True,
            has_scale=True,
            router="dense",
        )
    ),
    "experts of 4-bit floats": experts(
        ExpertCase(
            1,
            8,
            4,
            2880,
            2880,
            32,
            BRAIN,
            BRAIN,
            "clamped",
            is_mxfp4=True,
            has_bias=True,
            router="dense",
            router_bias=True,
        )
    ),
    "experts in groups": experts(
        ExpertCase(1, 64, 6, 2048, 96, 32, BRAIN, BRAIN, groups=(8, 3), shared=192)
    ),
    "many rows of many experts": experts(
        ExpertCase(8, 512, 10, 2048, 64, 64, BRAIN, BRAIN, renormalise=False)
    ),
    "scores of rows yet to be summed up": lambda target: scores_of_sum(
        StreamSum(*(mx.zeros((1, 2816), BRAIN),) * 2, mx.zeros((2817,))),
        Norm(mx.zeros((2816,)), 1e-6),
        mx.zeros((128, 2816), BRAIN),
        target=target,
    ),
    "scores of wide rows": lambda target: experts_scores(
        mx.zeros((1, 10_240), BRAIN),
        Norm(mx.zeros((10_240,), BRAIN), 1e-6),
        mx.zeros((4, 10_240), BRAIN),
        target=target,
    ),
    "sums of experts": lambda target: mix_sorted(
        mx.zeros((9, 320), BRAIN),
        mx.zeros((9, 4), mx.int32),
        mx.zeros((9, 4)),
        ExpertCase(1, 5, 4, 320, 64, 32, BRAIN, BRAIN).experts(),
        target=target,
    ),
    "rows of a table": lambda target: int4_rows(
        mx.zeros((3,), mx.int32), quantized(37, 96, 4, 32)[0], 2.0, target=target
    ),
    "norm": norm(2817, BRAIN),
    "largest of a row": lambda target: argmax_rows(mx.zeros((1, 128_256)), target=target),
    "one query": attention(IN_BF16),
    "eight queries and a window": attention(replace(IN_WINDOW, dtype=HALF, kv_dtype=HALF)),
    "wide heads": attention(AttentionCase(2, (8, 1), 512, end=200, boundary=0, tail=256)),
    "many queries of narrow heads": attention(replace(IN_BF16, T=8, heads=(16, 2), D=64)),
    "queries of heads of 192": attention(replace(IN_BF16, T=8, heads=(8, 2), D=192)),
    "many queries of wide heads": attention(replace(IN_BF16, T=8, heads=(16, 2), D=512)),
    "keys of another type": attention(replace(IN_BF16, T=8, kv_dtype=HALF)),
    "latents of one row": LatentCase(
        1, (16, 512, 64, 128, 128), 200, 256, 128, 64, tail=128, dtype=BRAIN
    ).run,
    "latents of eight rows, floats": LatentCase(
        8, (16, 512, 64, 128, 128), 200, 256, 128, None, tail=128, dtype=HALF
    ).run,
    **{f"heads {case}": case.run for case in HEAD_CASES[3:6]},
    **{f"rotated {case}": case.run for case in ROTATED_CASES},
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_body_compiles_for_cuda_without_spills(launch: str, headers: Path) -> None:
    sources: list[str] = []
    LAUNCHES[launch](recording(sources))
    assert sources
    for source in sources:
        report = compile_source(source, headers)
        spills = re.search(r"\b(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        allowed = [n for name, n in SPILLED.items() if f"custom_kernel_{name}" in source]
        assert spills, report
        assert max(map(int, spills.groups())) <= sum(allowed) * ("RESIDENT" in source), report


@pytest.mark.parametrize(
    "launch", [product(CASES[7], int4_mma), ROTATED_CASES[1].run], ids=["alone", "with a part"]
)
def test_a_body_is_found_by_its_path(launch: Callable[[GpuTarget], object], headers: Path) -> None:
    sources: list[str] = []
    launch(replace(recording(sources), by_path=True))
    assert len(sources[0]) < 3000
    compile_source(sources[0], headers)


def test_a_body_that_mixes_types_does_not_compile(headers: Path) -> None:
    sources: list[str] = []
    gemv(GemvCase(1, 37, 96, 32, HALF, HALF))(recording(sources))
    broken = sources[0].replace("static_cast<float>(scales[group])", "scales[group] * 1.0")
    assert broken != sources[0]
    with pytest.raises(AssertionError, match="more than one operator"):
        compile_source(broken, headers)

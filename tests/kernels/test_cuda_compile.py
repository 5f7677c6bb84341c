"""Every body compiles for CUDA, without spills."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from kernels.cases_gpu_attention import AttentionCase
from kernels.cases_gpu_int4_gemv import GemvCase
from kernels.cuda_source import compile_source, recording, write_headers
from kernels.matrices import rows

from turbospark.kernels.gpu.int4_gemv import int4_gemv
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.weights import Norm

HALF, BRAIN = mx.float16, mx.bfloat16


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    write_headers(folder)
    return folder


def gemv(case: GemvCase) -> Callable[[GpuTarget], object]:
    return lambda target: int4_gemv(case.x(), case.weight()[0], target=target)


def norm(width: int, dtype: mx.Dtype) -> Callable[[GpuTarget], object]:
    x = rows(3, width).astype(dtype)
    return lambda target: rms_norm(x, Norm(x[0], 1e-6), target=target)


def attention(case: AttentionCase) -> Callable[[GpuTarget], object]:
    return case.run


IN_BF16 = AttentionCase(1, (8, 2), 128, 300, 256, sealed=256, tail=128, dtype=BRAIN, kv_dtype=BRAIN)
IN_WINDOW = AttentionCase(8, (8, 2), 256, 300, 256, sealed=256, tail=128, window=90, sinks=True)
LAUNCHES = {
    "one row": gemv(GemvCase(1, 2051, 2560, 64, BRAIN, BRAIN)),
    "eight rows": gemv(GemvCase(8, 2051, 2560, 64, HALF, HALF)),
    "five rows of a small weight": gemv(GemvCase(5, 37, 96, 32, mx.float32, BRAIN, zero=True)),
    "norm": norm(2817, BRAIN),
    "one query": attention(IN_BF16),
    "eight queries and a window": attention(replace(IN_WINDOW, dtype=HALF, kv_dtype=HALF)),
    "wide heads": attention(AttentionCase(2, (8, 1), 512, end=200, boundary=0, tail=256)),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_body_compiles_for_cuda_without_spills(launch: str, headers: Path) -> None:
    sources: list[str] = []
    LAUNCHES[launch](recording(sources))
    assert sources
    for source in sources:
        report = compile_source(source, headers)
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", report), report


def test_a_body_that_mixes_types_does_not_compile(headers: Path) -> None:
    sources: list[str] = []
    gemv(GemvCase(1, 37, 96, 32, HALF, HALF))(recording(sources))
    broken = sources[0].replace("static_cast<float>(scales[group])", "scales[group] * 1.0")
    assert broken != sources[0]
    with pytest.raises(AssertionError, match="more than one operator"):
        compile_source(broken, headers)

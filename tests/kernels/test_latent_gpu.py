from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import BACKWARDS, EMULATION, ROUNDING, TARGETS, mutated, resolve
from kernels.cases_gpu_latent import CASES, LatentCase
from kernels.matrices import relative_error, rows
from metal_emu import MetalRunError, require_emulator

from turbospark.caches.latent import LatentCache
from turbospark.caches.step import StepCache
from turbospark.errors import ShapeError
from turbospark.kernels.gpu.latent import CHUNKS, latent_queries, latent_step
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.kernels.kv_rows import StepRows
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.latent import LatentAttention
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

SLACK = 6
FAST = 2e-5  # of a GPU's fast exponentials


def tolerance(case: LatentCase) -> float:
    return SLACK * ROUNDING[case.dtype] + FAST


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_attention_over_keys_and_values_written_out(
    case: LatentCase, target: str
) -> None:
    gpu = resolve(target)
    assert gpu is not None
    assert max(case.errors(gpu)) < tolerance(case)


def test_the_order_of_threadgroups_does_not_matter() -> None:
    require_emulator()
    forth, back = (CASES[1].run(target)[0] for target in (EMULATION, BACKWARDS))
    assert mx.array_equal(forth, back)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_a_row_does_not_depend_on_its_neighbours(target: str) -> None:
    gpu, case = resolve(target), CASES[1]
    assert gpu is not None
    unit, (q, row), rows = case.unit(), case.inputs(), case.step_rows()
    together, _ = case.run(gpu)
    tail, alone = rows.tail, []
    for i in range(case.T):
        lengths = mx.array([case.boundary, case.start + i], mx.int32)
        now = rows._replace(sealed=tail, tail=tail, lengths=lengths)
        one, tail = latent_queries(q[i : i + 1], row[i : i + 1], now, unit, target=gpu)
        now = now._replace(sealed=tail, tail=tail)
        alone.append(latent_step(one, now, unit, q.dtype, target=gpu))
    assert mx.array_equal(together, mx.concatenate(alone))


QUERIES, PARTIALS, VALUES = "latent_queries", "latent_partials", "latent_values"
MUTATIONS = [
    (QUERIES, "sum * numbers[2]", "sum", None),
    (QUERIES, "+ n, column", ", column", None),
    (QUERIES, "static_cast<float>(norm_weight[d])", "1.0f", None),
    (QUERIES, ", numbers[0])", ", 0.0f)", None),
    (QUERIES, "start + m)", "start)", None),
    (QUERIES, "IS_TRADITIONAL ? 2 * pair : pair", "pair", "conflict"),
    (QUERIES, "metal::min(COPY_ROWS, held - first)", "COPY_ROWS - 1", "."),
    (QUERIES, "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race on|uninit"),
    (QUERIES, "if (own < L)", "if (own <= L)", "out of bounds|conflict|writ"),
    (PARTIALS, "is_seen = p <= position", "is_seen = p < high", None),
    (PARTIALS, "sum[t][c] *= own_fade", "sum[t][c] *= 1.0f", None),
    (PARTIALS, "turned[t][2 * c + x], dot", "0.0f, dot", None),
    (PARTIALS, "at < boundary", "at <= boundary", None),
    (PARTIALS, "dot += simd_shuffle_xor(dot, 1);", "", None),
    (PARTIALS, "metal::fma(total, fade, weight)", "total + weight", None),
    (VALUES, "HEAD_ROWS + N", "HEAD_ROWS", None),
    (VALUES, "whole += group_total[g];", "whole = group_total[g];", None),
    (VALUES, "metal::fast::exp(own.v[0] - top)", "1.0f", None),
    (VALUES, "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race on|uninit"),
]


@pytest.mark.parametrize(("body", "old", "new", "what"), MUTATIONS)
def test_a_planted_mutation_is_caught(body: str, old: str, new: str, what: str | None) -> None:
    case = LatentCase(3, (3, 96, 10, 11, 9), 70, 80, 64, layout=32, tail=21)
    target = mutated(body, old, new)
    if what is None:
        assert not max(case.errors(target)) < tolerance(case)
        return
    with pytest.raises(MetalRunError, match=what):
        case.errors(target)


def test_rows_that_do_not_fit_are_refused() -> None:
    case = CASES[0]
    (q, row), unit = case.inputs(), case.unit()
    with pytest.raises(ShapeError, match=r"row \(1, 70\)"):
        latent_queries(q, row[:, 1:], case.step_rows(), unit, target=EMULATION)
    many = mx.zeros((9, q.shape[1]))
    with pytest.raises(ShapeError, match="1 to 8 rows"):
        latent_queries(many, mx.zeros((9, 70)), case.step_rows(), unit, target=EMULATION)


def test_chunks_grow_with_the_context() -> None:
    assert CHUNKS.count(128, 1, None) == 4
    assert CHUNKS.count(33_000, 1, None) < 350
    assert np.all(np.diff([CHUNKS.of(p) for p in range(5000)]) >= 0)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("target", TARGETS[1:])
def test_the_unit_decodes_as_its_reference_does(target: str, in_step: bool) -> None:
    """The reference in float32: in 16 bits it is as far from that as bodies are."""
    gpu, case = resolve(target), CASES[3]
    assert gpu is not None
    own, exact = unit_of(case, case.dtype), unit_of(case, mx.float32)
    own.bind(GpuKernels(gpu, KernelPolicy()))
    assert own.body == gpu.name
    with mx.stream(mx.cpu):  # MLX on CUDA has no product for such odd sizes
        wanted = fed(exact, case, mx.float32, in_step=False)
    found = fed(own, case, case.dtype, in_step)
    assert relative_error(found, wanted) < 6 * ROUNDING[case.dtype]


def unit_of(case: LatentCase, dtype: mx.Dtype) -> LatentAttention:
    """A unit whose weights have the values of the case's."""
    layer, sizes = case.unit().layer, case.geometry
    codes, weight = layer.expand, layer.norm.weight
    assert isinstance(codes, QuantizedWeight)
    assert codes.biases is not None
    assert weight is not None
    mx.eval(codes.codes, codes.scales, codes.biases)
    scales, biases = codes.scales.astype(dtype), codes.biases.astype(dtype)
    norm = RMSNorm(sizes.latent_dim, layer.norm.eps)
    expand = Linear(sizes.latent_dim, sizes.expanded)
    norm.weight = weight
    expand.assign(replace(codes, scales=scales, biases=biases))
    return LatentAttention(sizes, layer.rope, norm=norm, expand=expand, scale=layer.scale)


def fed(unit: LatentAttention, case: LatentCase, dtype: mx.Dtype, in_step: bool) -> np.ndarray:
    """What a prompt of five rows, then two passes of two make of the unit."""
    sizes = case.geometry
    q = rows(9, sizes.num_heads * sizes.query_dim, seed=8).astype(case.dtype).astype(dtype)
    row = rows(9, sizes.row_dim, seed=9).astype(case.dtype).astype(dtype)
    cache: Any = LatentCache(sizes.latent_dim, sizes.rope_dim, 64)
    made = [unit(q[:5], row[:5], cache, Phase.PREFILL)]
    for start in (5, 7):
        if in_step and not isinstance(cache, StepCache):
            sealed, tail, boundary = cache.step_blocks(4)
            assert sealed is tail
            cache = StepCache(StepRows(tail, tail, mx.array([boundary, start], mx.int32)))
        elif in_step:
            now = cache.rows()
            cache = StepCache(StepRows(now.tail, now.tail, now.lengths + mx.array([0, 2])))
        part = slice(start, start + 2)
        made.append(unit(q[part], row[part], cache, Phase.DECODE))
    return np.array(mx.concatenate(made).astype(mx.float32))

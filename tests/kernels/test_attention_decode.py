import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import (
    BACKWARDS,
    EMULATION,
    ROUNDING,
    TARGETS,
    mutated,
    resolve,
    tensor_emulation,
)
from kernels.cases_gpu_attention import CASES, SCALE, TENSOR_CASES, AttentionCase
from kernels.matrices import relative_error
from metal_emu import MetalRunError, require_emulator

from turbospark.caches.ring import RingCache
from turbospark.errors import ShapeError
from turbospark.kernels.gpu import attention_geometry
from turbospark.kernels.gpu.attention_decode import attention_decode, attention_step
from turbospark.kernels.gpu.attention_geometry import Chunks
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.kv_rows import RowBlock, StepRows

SLACK = 8
GPUS = [*TARGETS[1:], "tensor"]


def on(name: str) -> GpuTarget | None:
    return tensor_emulation() if name == "tensor" else resolve(name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_softmax_over_the_keys_seen(case: AttentionCase, target: str) -> None:
    assert case.error(on(target)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", ["tensor", *TARGETS[2:]])
@pytest.mark.parametrize("case", TENSOR_CASES, ids=str)
def test_attention_on_tensor_cores_is_the_same(case: AttentionCase, target: str) -> None:
    assert case.error(on(target)) < SLACK / 2 * ROUNDING[case.dtype]


ALONE = [CASES[3], CASES[7], replace(CASES[8], dtype=mx.float16, kv_dtype=mx.float16)]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: AttentionCase, target: str) -> None:
    gpu = on(target)
    together, rows = case.run(gpu), case.rows()
    q = mx.array(case.arrays()["q"]).astype(case.dtype)
    sinks = mx.array(case.arrays()["sinks"]) if case.sinks else None
    for t in range(case.T):
        until = rows._replace(end=case.end - case.T + t + 1)
        alone = attention_decode(q[t : t + 1], until, SCALE, case.window, sinks, target=gpu)
        assert mx.array_equal(together[t : t + 1], alone)


STRADDLING = AttentionCase(5, (2, 1), 32, 259, 256, sealed=256, tail=128)


@pytest.mark.parametrize("target", ["emulation", "tensor"])
@pytest.mark.parametrize("window", [None, 130])
def test_rows_that_straddle_a_chunk_equal_single_rows(window: int | None, target: str) -> None:
    """The verify begins a chunk more than its first rows alone, and ends one later."""
    case = replace(STRADDLING, window=window, dtype=mx.bfloat16, kv_dtype=mx.bfloat16)
    test_a_row_does_not_depend_on_its_neighbours(case, target)


@pytest.mark.parametrize("target", ["emulation", "tensor"])
@pytest.mark.parametrize("cut", [Chunks(128, 2), Chunks(128, 2, 1)])
def test_chunks_that_grow_give_the_same(
    target: str, cut: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_geometry, "chunks", lambda *_, **__: cut)
    case = AttentionCase(2, (2, 1), 32, 1400, 1300, sealed=1408, tail=128)
    case = replace(case, dtype=mx.float16, kv_dtype=mx.float16)
    assert case.error(on(target)) < SLACK / 2 * ROUNDING[case.dtype]


@pytest.mark.parametrize(
    "cut", [Chunks(96, 0), Chunks(128, 1), Chunks(64, 16), Chunks(96, 32), Chunks(128, 16, 2)]
)
def test_chunks_cover_every_position_once(cut: Chunks) -> None:
    size, first, starts = cut.size, cut.first, [0]
    while starts[-1] < 40_000:
        level = min((len(starts) - 1) // first, cut.doublings) if first else 0
        starts.append(starts[-1] + (size << level))
    numbers = np.searchsorted(starts, np.arange(40_000), side="right") - 1
    assert [cut.of(p) for p in range(0, 40_000, 31)] == numbers[::31].tolist()
    assert cut.count(30_001, 3, None) == numbers[30_000] + 1


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("window", [1, 11, 64, 130])
def test_a_window_has_chunks_enough_wherever_it_stands(window: int, rows: int) -> None:
    cut = Chunks(64, 0)
    needed = [
        cut.of(start + rows - 1) - cut.of(max(0, start + 1 - window)) + 1 for start in range(300)
    ]
    assert cut.count(10_000, rows, window) == max(needed)


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    forwards, backwards = (CASES[7].run(t) for t in (EMULATION, BACKWARDS))
    assert mx.array_equal(forwards, backwards)
    case = TENSOR_CASES[1]
    assert mx.array_equal(case.run(tensor_emulation()), case.run(tensor_emulation(order=1)))


@pytest.mark.parametrize("target", TARGETS)
def test_the_rows_of_a_ring_cache_serve(target: str) -> None:
    cache = RingCache(1, 32, max_context=1000, window=150, slack=20)
    chunk = AttentionCase(1, (1, 1), 32, end=500, boundary=0).arrays()
    k, v = (mx.array(chunk[name]).swapaxes(0, 1) for name in ("k", "v"))
    for start in range(0, 500, 125):
        cache.append(k[start : start + 125], v[start : start + 125])
    q = mx.array(np.random.default_rng(0).normal(size=(3, 1, 32)).astype(np.float32))
    found = attention_decode(q, cache.rows(), SCALE, 150, target=on(target))
    scores = (q[:, 0] @ k[:, 0].T) * SCALE
    keys, queries = mx.arange(500), mx.arange(497, 500)[:, None]
    seen = (keys <= queries) & (keys > queries - 150)
    wanted = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ v[:, 0]
    assert relative_error(found, np.array(wanted)) < SLACK * ROUNDING[mx.float32]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("step", [32, 77])
def test_a_gate_multiplies_by_its_sigmoid(step: int, target: str) -> None:
    case, gpu = CASES[9], on(target)
    q, rows = mx.array(case.arrays()["q"]), case.rows()
    assert gpu is not None
    assert rows.sealed is not None
    assert rows.tail is not None
    lengths = mx.array([rows.boundary, rows.end - case.T], mx.int32)
    gate = mx.random.normal((case.T, 3, step), key=mx.random.key(1))
    gated = attention_step(
        q, StepRows(rows.sealed, rows.tail, lengths), SCALE, case.window, gate=gate, target=gpu
    )
    opening = mx.reshape(mx.sigmoid(gate[..., : case.D]), (case.T, -1))
    wanted = case.run(gpu) * opening
    assert relative_error(gated, np.array(wanted)) < SLACK * ROUNDING[mx.float32]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("sinks", [False, True])
def test_one_chunk_alone_gives_the_bits_of_two_passes(sinks: bool, D: int, target: str) -> None:
    """A text that outgrows its first rows, or a verify, sees no other result for a position."""
    case, gpu = AttentionCase(3, (6, 2), D, end=101, boundary=0, tail=128), on(target)
    case = replace(case, sinks=sinks, dtype=mx.bfloat16, kv_dtype=mx.bfloat16)
    rows, lengths = case.rows(), mx.array([0, 98], mx.int32)
    assert gpu is not None
    assert rows.tail is not None
    q = mx.array(case.arrays()["q"]).astype(case.dtype)
    scores = mx.array(case.arrays()["sinks"]) if sinks else None
    tail, more = rows.tail, RowBlock(mx.zeros((2, 512, D), q.dtype), mx.zeros((2, 512, D), q.dtype))
    launches: list[str] = []
    found = [
        attention_step(q, step, SCALE, None, scores, target=counted(gpu, launches))
        for step in (StepRows(tail, tail, lengths), StepRows(more, tail, lengths))
    ]
    assert launches.count("attention_combine") == 1
    assert len(launches) == 3
    assert mx.array_equal(*found)


def counted(gpu: GpuTarget, launches: list[str]) -> GpuTarget:
    """The target, whose kernels note their names."""

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        launch = gpu.builder(**names)

        def noted(**call: Any) -> Sequence[mx.array]:
            launches.append(names["name"])
            return launch(**call)

        return noted

    return replace(gpu, builder=build)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
FENCE = "simdgroup_barrier(mem_flags::mem_threadgroup);\n"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "what"),
    [
        ("partials", FENCE, "", "race on|uninitialised"),
        ("partials", BARRIER, "", "race on|uninitialised|conflicting"),
        ("partials", "if (i < M * SHARE) {", "{", "out of bounds|conflicting"),
        ("partials", "p <= position", "p != position", None),
        ("partials", "if (block + 32 <= low)", "if (block <= low)", None),
        ("partials", "slot - sealed_capacity)", "slot)", "out of bounds"),
        ("partials", "i % SHARE", "0 * i", "conflicting|never written"),
        ("partials", "|| p > position - WINDOW", "|| p > position - WINDOW - 1", None),
        ("partials", "*= score_factor", "*= 1.0f", None),
        ("partials", "within == turn + b", "within == turn + (b ^ 1)", None),
        ("partials", "sum[t][c] *= fade; }\n    }\n    simdgroup", "}\n    }\n    simdgroup", None),
        ("partials", "total[t], fade, weight", "total[t], 1.0f, weight", None),
        ("combine", "if (thread_index_in_simdgroup == 0)", "", "race on|conflicting"),
        ("combine", "total += group_total[group]", "total = group_total[group]", None),
        ("combine", "metal::fma(weight, own.v[1], total)", "total + own.v[1]", None),
        ("combine", "metal::fast::exp(sink - top)", "0.0f", None),
    ],
)
def test_a_planted_mutation_is_caught(
    kernel: str, old: str, new: str, what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A ring that wraps inside a chunk, SIMD-groups with two blocks, a partial tile of queries.
    monkeypatch.setattr(attention_geometry, "chunks", lambda *_, **__: Chunks(256, 0))
    case = AttentionCase(7, (3, 1), 32, 261, 258, first=96, sealed=162, tail=9, window=131)
    case = replace(case, sinks=True)
    target = mutated(f"attention_{kernel}", old, new)
    if what is None:
        assert not case.error(target) < SLACK * ROUNDING[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            case.error(target)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("joined[n], 0.0f) * query_share[n / D]", "joined[n], 0.0f)"),
        ("metal::fma(query_weight[n / D], joined[n], 0.0f)", "joined[n]"),
        ("static_cast<float>(sinks[head])", "static_cast<float>(sinks[0])"),
        ("query_weight[t] = share.v[0]", "query_weight[0] = share.v[0]"),
    ],
)
def test_a_mutation_where_one_chunk_is_all_is_caught(old: str, new: str) -> None:
    case, target = replace(CASES[6], end=3), mutated("attention_partials", old, new)
    assert case.error(EMULATION) < SLACK * ROUNDING[case.dtype]
    try:
        assert not case.error(target) < SLACK * ROUNDING[case.dtype]
    except MetalRunError:
        return


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (BARRIER, ""),
        ("halves_of(i & 1,", "halves_of(0,"),
        ("upper.v[2 * h], lower.v[2 * h]", "lower.v[2 * h], upper.v[2 * h]"),
        ("sum[tile][i][2 * h + 1] *= fade;", ""),
        ("p <= position", "p != position"),
        ("all += warp_value", "all = warp_value"),
        ("joined[n] + sum[tile][c][x]", "sum[tile][c][x]"),
        ("weight - static_cast<float>(coarse[x])", "0.0f * weight"),
    ],
)
def test_a_mutation_of_the_tensor_body_is_caught(old: str, new: str) -> None:
    case, target = replace(TENSOR_CASES[0], sinks=True), tensor_emulation()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if names["name"] == "attention_tensor":
            assert old in names["source"]
            names["source"] = names["source"].replace(old, new)
        return target.builder(**names)

    exact = case.run(target).astype(mx.float32)
    mutant = replace(target, builder=build)
    try:
        found = case.run(mutant).astype(mx.float32)
    except MetalRunError:
        return
    assert not relative_error(found, np.array(exact)) < ROUNDING[mx.float32]


def test_a_compiled_step_serves_every_length() -> None:
    """What changes from token to token is an array, so nothing is traced or compiled anew."""
    launched: list[object] = []

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            launched.append((names["name"], call["template"], call["grid"]))
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            lengths = call["inputs"][names["input_names"].index("lengths")]
            return [mx.zeros(shape, dtype) + lengths[0].astype(dtype) for shape, dtype in shapes]

        return launch

    gpu = GpuTarget("recording", "metal.h", build)
    sealed, tail = (mx.zeros((1, rows, 64)) for rows in (256, 128))

    @mx.compile
    def step(q: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        rows = StepRows(RowBlock(sealed, sealed), RowBlock(tail, tail), lengths)
        return attention_step(q, rows, SCALE, 33, target=gpu), lengths + mx.array([0, 2])

    lengths = mx.array([0, 30], mx.int32)
    for turn in range(100):
        y, lengths = step(mx.zeros((2, 4, 64)), lengths)
        mx.eval(y, lengths)
        assert lengths[1].item() == 32 + 2 * turn
    assert len(launched) == 2


def test_shapes_that_have_no_body_are_refused() -> None:
    rows = CASES[1].rows()
    for q in (mx.zeros((9, 6, 96)), mx.zeros((6, 96)), mx.zeros((0, 6, 96))):
        with pytest.raises(ShapeError, match="takes 1 to 8 query rows"):
            attention_decode(q, rows, SCALE)
    with pytest.raises(ShapeError, match="takes 1 to 1 query rows here"):
        attention_decode(mx.zeros((2, 3, 64)), CASES[0].rows(), SCALE)
    for q in (mx.zeros((1, 6, 64)), mx.zeros((1, 5, 96))):
        with pytest.raises(ShapeError, match="takes head dimensions"):
            attention_decode(q, rows, SCALE)
    with pytest.raises(ShapeError, match=r"takes sinks \(6,\)"):
        attention_decode(mx.zeros((1, 6, 96)), rows, SCALE, sinks=mx.zeros(5))
    with pytest.raises(ShapeError, match="holds none before 261"):
        attention_decode(mx.zeros((1, 6, 96)), CASES[8].rows(), SCALE, None)


@pytest.mark.parametrize("head_dim", range(8, 513, 8))
def test_lanes_and_columns_divide_a_head(head_dim: int) -> None:
    if attention_geometry.has_vector_shape(head_dim):
        heads = attention_geometry.HeadGeometry(8, 2, head_dim)
        shape = attention_geometry.vector_shape(heads, 1)
        assert shape.lanes * shape.quads * 4 == head_dim
        assert 32 % shape.lanes == 0
        assert head_dim % (4 * attention_geometry.combine_lanes(head_dim)) == 0
    assert (
        attention_geometry.has_vector_shape(head_dim)
        or head_dim % 32
        or math.gcd(head_dim, 64) == 32
    )

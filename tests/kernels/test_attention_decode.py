from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import BACKWARDS, EMULATION, ROUNDING, TARGETS, mutated, resolve
from kernels.cases_gpu_attention import CASES, SCALE, AttentionCase
from kernels.matrices import relative_error
from metal_emu import MetalRunError, require_emulator

from turbospark.caches.ring import RingCache
from turbospark.errors import ShapeError
from turbospark.kernels.gpu.attention_decode import attention_decode
from turbospark.kernels.gpu.kernel import GpuTarget

SLACK = 8


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_softmax_over_the_keys_seen(case: AttentionCase, target: str) -> None:
    assert case.error(resolve(target)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[3], CASES[7], CASES[8]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: AttentionCase, target: str) -> None:
    gpu = resolve(target)
    together, rows = case.run(gpu), case.rows()
    q = mx.array(case.arrays()["q"]).astype(case.dtype)
    sinks = mx.array(case.arrays()["sinks"]) if case.sinks else None
    for t in range(case.T):
        until = rows._replace(end=case.end - case.T + t + 1)
        alone = attention_decode(q[t : t + 1], until, SCALE, case.window, sinks, target=gpu)
        assert mx.array_equal(together[t : t + 1], alone)


def test_rows_that_straddle_a_chunk_equal_single_rows() -> None:
    """The verify begins a chunk more than its first rows alone, and ends one later."""
    case = AttentionCase(5, (2, 1), 32, 259, 256, sealed=256, tail=128, window=130)
    test_a_row_does_not_depend_on_its_neighbours(case, "emulation")


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    assert mx.array_equal(CASES[7].run(EMULATION), CASES[7].run(BACKWARDS))


@pytest.mark.parametrize("target", TARGETS)
def test_the_rows_of_a_ring_cache_serve(target: str) -> None:
    cache = RingCache(1, 32, max_context=1000, window=150, slack=20)
    chunk = AttentionCase(1, (1, 1), 32, end=500, boundary=0).arrays()
    k, v = (mx.array(chunk[name]).swapaxes(0, 1) for name in ("k", "v"))
    for start in range(0, 500, 125):
        cache.append(k[start : start + 125], v[start : start + 125])
    q = mx.array(np.random.default_rng(0).normal(size=(3, 1, 32)).astype(np.float32))
    found = attention_decode(q, cache.rows(), SCALE, 150, target=resolve(target))
    scores = (q[:, 0] @ k[:, 0].T) * SCALE
    keys, queries = mx.arange(500), mx.arange(497, 500)[:, None]
    seen = (keys <= queries) & (keys > queries - 150)
    wanted = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ v[:, 0]
    assert relative_error(found, np.array(wanted)) < SLACK * ROUNDING[mx.float32]


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SCORES = "score[t * CHUNK + j] = is_seen ? dot[t] : masked;\n    }\n  }\n}\n"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "what"),
    [
        ("partials", SCORES + BARRIER, SCORES, "race on|uninitialised"),
        ("partials", "if (i < M * SHARE) {", "{", "out of bounds|conflicting"),
        ("partials", "p >= low && p < high", "p >= low", None),
        ("partials", "slot - sealed_capacity)", "slot)", "out of bounds"),
        ("partials", "i % SHARE", "0 * i", "conflicting|never written"),
        ("partials", "|| p > position - WINDOW", "|| p > position - WINDOW - 1", None),
        ("partials", "p <= position &&", "", None),
        ("partials", "* scale[0]", "", None),
        ("combine", "if (thread_index_in_simdgroup == 0)", "", "race on|conflicting"),
        ("combine", "group == 0 ? sum[i] : joined[column + i] + sum[i]", "sum[i]", None),
        ("combine", "metal::fma(weight, totals[n], total)", "total + totals[n]", None),
        ("combine", "metal::fast::exp(sink - top)", "0.0f", None),
    ],
)
def test_a_planted_mutation_is_caught(kernel: str, old: str, new: str, what: str | None) -> None:
    # A ring that wraps inside the chunk, and two tiles of queries, the second one partial.
    case = replace(CASES[9], sinks=True)
    target = mutated(f"attention_{kernel}", old, new)
    if what is None:
        assert not case.error(target) < SLACK * ROUNDING[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            case.error(target)


def test_no_length_is_a_template_value() -> None:
    """A longer text must not compile anew: only a model's sizes and the row count may."""
    templates: list[object] = []

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            templates.append((names["name"], call["template"]))
            pairs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return launch

    for end, boundary, sealed, tail in ((37, 0, 0, 128), (300, 256, 384, 128), (999, 0, 0, 999)):
        case = AttentionCase(2, (4, 1), 64, end, boundary, sealed=sealed, tail=tail, window=33)
        case.run(GpuTarget("recording", "metal.h", build))
    assert templates[0:2] == templates[2:4] == templates[4:6]


def test_shapes_that_have_no_body_are_refused() -> None:
    rows = CASES[1].rows()
    for q in (mx.zeros((9, 6, 96)), mx.zeros((6, 96)), mx.zeros((0, 6, 96))):
        with pytest.raises(ShapeError, match="takes 1 to 8 query rows"):
            attention_decode(q, rows, SCALE)
    for q in (mx.zeros((1, 6, 64)), mx.zeros((1, 5, 96))):
        with pytest.raises(ShapeError, match="takes head dimensions"):
            attention_decode(q, rows, SCALE)
    with pytest.raises(ShapeError, match=r"takes sinks \(6,\)"):
        attention_decode(mx.zeros((1, 6, 96)), rows, SCALE, sinks=mx.zeros(5))
    with pytest.raises(ShapeError, match="holds none before 261"):
        attention_decode(mx.zeros((1, 6, 96)), CASES[8].rows(), SCALE, None)

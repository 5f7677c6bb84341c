"""The likeliest token of each row, against numpy."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import EMULATION, TARGETS, mutated, resolve
from metal_emu import MetalRunError

from turbospark.errors import ShapeError
from turbospark.kernels.gpu import argmax
from turbospark.kernels.gpu.argmax import NOT_FINITE, argmax_rows, serves
from turbospark.kernels.gpu.kernel import GpuTarget

RANDOM = np.random.default_rng(6)
DRAWN = RANDOM.normal(size=(3, 3001)).astype(np.float32)


def ties(M: int, V: int) -> np.ndarray:
    """Few different values, so that each stands in many places."""
    return RANDOM.integers(-3, 3, (M, V)).astype(np.float32)


CASES = {
    "three parts": DRAWN,
    "all below zero": DRAWN[:, :2050] - 9,
    "one part": DRAWN[:2, :77],
    "a value a part more": DRAWN[:1, :1025],
    "ties": ties(5, 2100),
    "ties within a SIMD-group": ties(2, 9),
    "zeros of both signs": np.where(np.arange(1111) % 7 < 6, -0.0, 0.0)[None].astype(np.float32),
    "one value": np.full((1, 1500), -2.5, np.float32),
    "the largest floats": np.array([[-3.4e38, 1, 3.4e38, 3.4e38, 0, 0, 0, 0, 3.3e38]], np.float32),
}


def found(logits: np.ndarray, target: GpuTarget) -> list[int]:
    return argmax_rows(mx.array(logits), target=target).tolist()


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES)
def test_the_first_of_the_largest_is_taken(case: str, target: str) -> None:
    gpu = resolve(target)
    assert gpu is not None
    assert found(CASES[case], gpu) == CASES[case].argmax(-1).tolist()


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -float("nan")])
@pytest.mark.parametrize("place", [0, 1023, 1024, 3000])
def test_a_row_that_is_not_finite_says_so(place: int, bad: float, target: str) -> None:
    gpu, logits = resolve(target), DRAWN.copy()
    assert gpu is not None
    logits[1, place] = bad
    wanted = logits.argmax(-1).tolist()
    wanted[1] = NOT_FINITE
    assert found(logits, gpu) == wanted


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("parts", "(bits ^ highest) + 1", "bits"),
        ("parts", "(bits ^ highest) + 1", "bits ^ highest"),
        ("parts", "is_finite ? ordered : highest", "ordered"),
        ("parts", "if (value > top)", "if (value >= top)"),
        ("parts", "top == simd_top ? -place : -V", "-place"),
        ("parts", "&& group_place[group] < place", "&& group_place[group] > place"),
        ("parts", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
        ("parts", "(part + 1) * SPAN, V)", "(part + 1) * SPAN, V - 1)"),
        ("parts", "metal::min((part + 1) * SPAN, V)", "(part + 1) * SPAN"),
        ("join", "other > top", "other >= top"),
        ("join", "top == simd_top ? -place : -V", "-place"),
        ("join", "part = lane; part", "part = 0 * lane; 32 * part"),
    ],
)
def test_a_planted_mutation_is_caught(
    kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argmax, "_SPAN", 128)
    monkeypatch.setattr(argmax, "_THREADS", 64)
    last = np.zeros((1, 257), np.float32)
    last[0, 256] = 1
    many = np.zeros((1, 4200), np.float32)
    many[0, 0] = many[0, 32 * 128] = 1  # parts of one lane
    infinite = np.where(np.arange(1300) == 40, -np.inf, 0)[None].astype(np.float32)
    small = [case for case in CASES.values() if case.size < 3000]
    cases = [*small, last, many, infinite]
    wanted = [*(case.argmax(-1).tolist() for case in cases[:-1]), [NOT_FINITE]]
    assert [found(case, EMULATION) for case in cases] == wanted
    target = mutated(f"argmax_{kernel}", old, new)
    try:
        assert [found(case, target) for case in cases] != wanted
    except MetalRunError:
        return


def test_other_arrays_are_refused() -> None:
    for logits in (mx.zeros((9,)), mx.zeros((0, 9)), mx.zeros((1, 7)), mx.zeros((1, 9), mx.int32)):
        with pytest.raises(ShapeError, match="argmax_rows takes float32 rows"):
            argmax_rows(logits, target=EMULATION)


def test_a_body_that_cannot_run_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    def build(**_: Any) -> Callable[..., Sequence[mx.array]]:
        raise RuntimeError("no such compiler")

    assert not serves(64, GpuTarget("metal", "metal.h", build))
    assert "no such compiler" in caplog.text
    assert serves(65, EMULATION)

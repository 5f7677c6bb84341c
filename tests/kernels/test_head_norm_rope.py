from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import BACKWARDS, EMULATION, ROUNDING, TARGETS, mutated, resolve
from kernels.cases_gpu_heads import CASES, HeadCase
from metal_emu import MetalRunError, require_emulator

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.head_norm_rope import head_norm_rope, head_norm_rope_reference
from turbospark.kernels.gpu.kernel import GpuTarget

SLACK = 8


def on(name: str) -> GpuTarget:
    target = resolve(name)
    assert target is not None
    return target


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_normed_and_rotated_and_rows_follow_the_tail(case: HeadCase, target: str) -> None:
    assert case.error(on(target)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_makes_the_same_rows(case: HeadCase) -> None:
    made = head_norm_rope_reference(*case.parts(), case.start, case.unit())
    expected = case.expected()
    bound = SLACK * ROUNDING[case.dtype]
    np.testing.assert_allclose(np.array(made[0].astype(mx.float32)), expected[0], atol=bound)
    if case.has_kv:
        for rows, tail in zip(made[1:], expected[1:], strict=True):
            assert rows is not None
            new = tail[:, case.held :].swapaxes(0, 1)
            np.testing.assert_allclose(np.array(rows.astype(mx.float32)), new, atol=bound)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_a_row_does_not_depend_on_its_neighbours(target: str) -> None:
    case, gpu = CASES[4], on(target)
    together, tail = case.run(gpu)
    q, k, v = case.parts()
    assert tail is not None
    assert k is not None
    assert v is not None
    for t in range(case.T):
        rows = case.step_rows()
        rows = rows._replace(lengths=rows.lengths + mx.array([0, t], mx.int32))
        one = slice(t, t + 1)
        alone, block = head_norm_rope(q[one], k[one], v[one], rows, case.unit(), target=gpu)
        assert block is not None
        assert mx.array_equal(together[one], alone)
        assert mx.array_equal(tail.k[:, case.held + t], block.k[:, case.held + t])


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    forwards, backwards = (CASES[1].run(t)[0] for t in (EMULATION, BACKWARDS))
    assert mx.array_equal(forwards, backwards)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("square_sum = simd_sum(square_sum);", "", None),
        ("static_cast<float>(D), eps", "static_cast<float>(D), 0.0f", None),
        ("scale * factor.v[j]", "scale", None),
        ("turns.v[j], -(second", "turns.v[j], (second", None),
        ("numbers[3]", "1.0f", None),
        ("static_cast<float>(start + row)", "static_cast<float>(start)", None),
        ("pair + j / turns * PAIRS", "pair + j / turns * (PAIRS - 1)", "conflicting|never written"),
        ("+ head * Q_STEP", "+ head * D", None),
        ("metal::min(COPY_ROWS, held - first)", "COPY_ROWS", "out of bounds|conflicting"),
        ("metal::min(COPY_ROWS, held - first)", "metal::min(COPY_ROWS, held - first - 1)", None),
        ("if (item < M * kinds) {", "{", "out of bounds|conflicting"),
        ("held + row) * D", "held) * D", "conflicting"),
        ("HAS_KV ? row", "HAS_KV ? 0 * row", None),
    ],
)
def test_a_planted_mutation_is_caught(old: str, new: str, what: str | None) -> None:
    rope = replace(CASES[4].rope, magnitude=1.25)
    case = replace(CASES[4], rope=rope, T=3, heads=(3, 1), dtype=mx.float32)
    target = mutated("head_norm_rope", old, new)
    if what is None:
        assert not case.error(target) < SLACK * ROUNDING[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            case.error(target)


def test_shapes_that_have_no_body_are_refused() -> None:
    case = CASES[1]
    q, k, v = case.parts()
    rows, unit = case.step_rows(), case.unit()
    assert k is not None
    with pytest.raises(ShapeError, match="takes 1 to 16 rows of 6 heads of 96"):
        head_norm_rope(q[:, 1:], k, v, rows, unit, target=EMULATION)
    with pytest.raises(ShapeError, match="both k and v"):
        head_norm_rope(q, k, None, rows, unit, target=EMULATION)
    with pytest.raises(ShapeError, match=r"takes k and v \(2, 192\)"):
        head_norm_rope(q, k[:, 1:], v, rows, unit, target=EMULATION)
    small = replace(case, tail=1, held=0).step_rows()
    with pytest.raises(ShapeError, match=r"into a tail, not into \(2, 1, 96\)"):
        head_norm_rope(q, k, v, small, unit, target=EMULATION)

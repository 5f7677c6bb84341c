import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import EMULATION, TARGETS, mutated, resolve
from kernels.matrices import quantized

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.int4_rows import int4_rows
from turbospark.kernels.gpu.kernel import GpuTarget

V = 37
CASES = [  # columns, group, scales, zero, tokens, factor
    (96, 32, mx.float32, False, [36, 0, 7, 7, 19], 1.0),
    (704, 64, mx.bfloat16, True, [5], 3.5),
    (1152, 128, mx.float16, False, [1, 2, 3, 4, 5, 6, 7, 8, 9], 0.25),
]


def error(case: tuple[int, int, mx.Dtype, bool, list[int], float], target: GpuTarget) -> float:
    """Largest difference over the largest value, past the rounding of one result."""
    C, group, dtype, zero, tokens, factor = case
    table, values = quantized(V, C, 4, group, zero=zero, scale_dtype=dtype)
    y = int4_rows(mx.array(tokens, mx.int32), table, factor, target=target)
    assert y.shape == (len(tokens), C)
    wanted = values[tokens] * factor
    return float(np.abs(np.array(y.astype(mx.float32)) - wanted).max() / np.abs(wanted).max())


ROUNDING = {mx.float32: 1e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-g{case[1]}")
def test_rows_are_those_of_the_dequantized_table(
    case: tuple[int, int, mx.Dtype, bool, list[int], float], target: str
) -> None:
    gpu = resolve(target)
    assert gpu is not None
    assert error(case, gpu) < ROUNDING[case[2]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("word >> (4 * i)", "word >> (28 - 4 * i)"),
        ("* factor[0]", ""),
        ("tokens[row]", "tokens[0]"),
        ("word_index / (GROUP / 8)", "word_index / GROUP"),
    ],
)
def test_a_planted_mutation_is_caught(old: str, new: str) -> None:
    case = (96, 32, mx.float32, False, [36, 0, 7, 7, 19], 2.0)
    assert error(case, mutated("int4_rows", old, new)) > ROUNDING[mx.float32]


def test_a_token_outside_the_table_reads_no_other_memory() -> None:
    table, _ = quantized(V, 96, 4, 32)
    y = int4_rows(mx.array([V + 3, -2], mx.int32), table, target=resolve("emulation"))
    edge = int4_rows(mx.array([V - 1, 0], mx.int32), table, target=EMULATION)
    assert mx.array_equal(y, edge)


@pytest.mark.parametrize(
    "tokens", [mx.zeros((0,), mx.int32), mx.zeros((2, 2), mx.int32), mx.zeros((3,), mx.uint32)]
)
def test_tokens_of_another_kind_are_refused(tokens: mx.array) -> None:
    with pytest.raises(ShapeError, match="int4_rows takes a row of int32 tokens"):
        int4_rows(tokens, quantized(V, 96, 4, 32)[0])

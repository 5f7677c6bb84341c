import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_rope import CASES, RopeCase

from turbospark.errors import UnsupportedError
from turbospark.kernels.rope import Rope, rope_frequencies, rope_reference

POSITION = 4099
PAIRS = {"partial": 24, "proportional": 256}
T, H, D = 7, 3, 22


def rope(pairs=11, **values):
    return Rope.build("default", 1e4, D, partial_rotary_factor=2 * pairs / D, **values)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_those_of_transformers(name):
    case: RopeCase = CASES[name]
    table, magnitude = rope_frequencies(case.kind, case.theta, case.head_dim, **case.values)
    assert table.dtype == np.float32
    assert len(table) == PAIRS.get(name, case.head_dim // 2)
    np.testing.assert_allclose(table[case.pairs], case.inv_freq, rtol=2e-7, atol=0)
    assert magnitude == pytest.approx(case.magnitude, rel=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.cos])
def test_angles_far_into_a_context_equal_those_of_transformers(name):
    case = CASES[name]
    built = Rope.build(case.kind, case.theta, case.head_dim, **case.values)
    cos, sin = built.rotation(POSITION, 1)
    # torch's float32 powers are off by one unit in the last place here and there.
    bound = 1e-6 + 2**-23 * POSITION * np.array(case.inv_freq)
    assert np.all(np.abs(cos[0, case.pairs] - case.cos) < bound)
    assert np.all(np.abs(sin[0, case.pairs] - case.sin) < bound)


def test_unknown_kind_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="'dynamic' is not implemented; known: default"):
        Rope.build("dynamic", 1e4, D)


def test_rotation_of_a_row_does_not_depend_on_the_rows_beside_it():
    built = Rope.build("default", 1e6, 128)
    cos, sin = built.rotation(100_003, 37)
    for row in range(37):
        alone = built.rotation(100_003 + row, 1)
        np.testing.assert_array_equal(cos[row], alone[0][0])
        np.testing.assert_array_equal(sin[row], alone[1][0])


def test_rotation_is_computed_once_a_step_for_all_layers():
    built = rope()
    assert built.rotation(5, T)[0] is built.rotation(5, T)[0]
    assert built.rotation(5, T)[0] is not built.rotation(6, T)[0]
    assert built.rotation_arrays(6, T)[0] is built.rotation_arrays(6, T)[0]


def in_double(x, built, offset, traditional):
    """The rotation of each pair as a product of complex numbers."""
    x = np.array(x).astype(np.float64)
    P = len(built.inv_freq)
    low, high = (slice(0, 2 * P, 2), slice(1, 2 * P, 2))
    if not traditional:
        low, high = slice(0, P), slice(P, 2 * P)
    angles = (offset + np.arange(len(x)))[:, None] * built.inv_freq.astype(np.float64)
    turned = (x[..., low] + 1j * x[..., high]) * built.magnitude * np.exp(1j * angles)[:, None]
    out = x.copy()
    out[..., low], out[..., high] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("pairs", [11, 5])
def test_reference_turns_pairs_in_the_plane(pairs, traditional):
    built = Rope(rope(pairs).inv_freq, D, 1.25, traditional)
    x = mx.array(np.random.default_rng(3).standard_normal((T, H, D), dtype=np.float32))
    out = rope_reference(x, built, 9)
    np.testing.assert_allclose(np.array(out), in_double(x, built, 9, traditional), atol=2e-6)


def test_pairs_without_a_frequency_pass_through_bit_for_bit():
    built = Rope.build("proportional", 1e6, D, partial_rotary_factor=0.28)
    x = mx.array(np.random.default_rng(3).standard_normal((T, H, D), dtype=np.float32))
    out, P = rope_reference(x, built, 9), D // 2
    assert np.count_nonzero(built.inv_freq) == 3
    for passed in (slice(3, P), slice(P + 3, D)):
        assert mx.array_equal(out[..., passed], x[..., passed])
    assert not mx.any(out[1:, :, :3] == x[1:, :, :3])


def test_reference_keeps_the_dtype():
    x = mx.ones((T, H, D), mx.bfloat16)
    assert rope_reference(x, rope(5), 9).dtype == mx.bfloat16

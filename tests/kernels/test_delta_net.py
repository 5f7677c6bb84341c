"""The delta-net step: reference, chunk form and host body against float64, and replays."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_delta_net import (
    GEOMETRIES,
    exact_step,
    inputs_of,
    some_rows,
    state_of,
    weights_of,
)
from kernels.host_bodies import ISAS, host_kernels

from turbospark.errors import ShapeError
from turbospark.kernels.delta_net import (
    DeltaRows,
    delta_chunks_reference,
    delta_rule_reference,
    fold_reference,
)
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.target import DeltaGeometry
from turbospark.nn.delta_net import DeltaNetStep
from turbospark.protocols import Phase

BODIES = ["reference", *ISAS]
ROWS = 13


def kernels_of(body):
    return ReferenceKernels() if body == "reference" else host_kernels(body)


class Store:
    """A cache that holds whatever state it is given."""

    def __init__(self, state):
        self.state, self.fed = state, 0

    def advance(self, count, state):
        self.fed += count
        self.state = state


@pytest.fixture(params=sorted(GEOMETRIES))
def heads(request):
    return GEOMETRIES[request.param]


@pytest.fixture(params=BODIES)
def body(request):
    return request.param


@pytest.fixture
def unit(heads, body):
    return bound(heads, kernels_of(body))


def bound(heads, kernels, gate="silu"):
    weights = weights_of(heads, gate=gate)
    unit = DeltaNetStep(heads, lambda: weights)
    unit.bind(kernels)
    return unit


def run(unit, inputs, state, sizes, phase=Phase.DECODE):
    """Outputs of all rows fed in passes of the given sizes, and the state after them."""
    store, outs, at = Store(state), [], 0
    for size in sizes:
        y, _ = unit(some_rows(inputs, at, at + size), store, phase)
        outs.append(np.array(y))
        at += size
    assert store.fed == at
    return np.concatenate(outs), [np.array(part) for part in store.state]


def close(got, expected, bound=2e-5):
    assert np.abs(got - expected).max() < bound * max(1.0, np.abs(expected).max())


def test_a_step_equals_the_formula(heads, unit, body):
    assert unit.body == ("reference" if body == "reference" else "host")
    inputs, state = inputs_of(heads, ROWS), state_of(heads)
    y, tail, S = exact_step(heads, weights_of(heads), inputs, state)
    got, after = run(unit, inputs, state, [ROWS])
    close(got, y)
    assert np.array_equal(after[0], tail.astype(np.float32))
    close(after[1], S)


def test_the_epsilon_of_a_head_stands_beside_the_sum_of_squares(heads, unit):
    inputs, state = inputs_of(heads, ROWS), state_of(heads)
    faint = type(inputs)(inputs.qkv * 2e-4, inputs.z, inputs.b, inputs.a)
    state = (state[0] * 2e-4, state[1])
    y, _, S = exact_step(heads, weights_of(heads), faint, state)
    got, after = run(unit, faint, state, [ROWS])
    close(got, y, 1e-4)
    close(after[1], S)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("sizes", [[1] * ROWS, [2, 1, 4, 6], [5, 8], [12, 1]])
def test_passes_of_any_size_are_one_computation(heads, unit, sizes, phase):
    inputs, state = inputs_of(heads, ROWS), state_of(heads)
    whole = run(unit, inputs, state, [ROWS])
    parts = run(unit, inputs, state, sizes, phase)
    assert np.array_equal(parts[0], whole[0])
    assert all(map(np.array_equal, parts[1], whole[1]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 7])
def test_threads_change_no_bit(heads, rows, threads):
    inputs, state = inputs_of(heads, rows), state_of(heads)
    one, other = (
        run(bound(heads, host_kernels(ISAS[0], count)), inputs, state, [rows])
        for count in (2, threads)
    )
    assert np.array_equal(one[0], other[0])
    assert all(map(np.array_equal, one[1], other[1]))


@pytest.mark.parametrize("keep", range(1, ROWS + 1))
def test_a_replay_leaves_what_a_shorter_pass_leaves(heads, unit, keep):
    inputs, state = inputs_of(heads, ROWS), state_of(heads)
    _, rows = unit(inputs, Store(state), Phase.DECODE, record=True)
    assert rows.rows == ROWS
    _, after = run(unit, inputs, state, [keep])
    assert all(map(np.array_equal, map(np.array, rows.replay(keep)), after))


def test_recording_changes_no_bit(heads, unit):
    inputs, state = inputs_of(heads, ROWS), state_of(heads)
    plain, recorded = Store(state), Store(state)
    y, nothing = unit(inputs, plain, Phase.DECODE)
    z, _ = unit(inputs, recorded, Phase.DECODE, record=True)
    assert nothing is None
    assert np.array_equal(y, z)
    assert all(map(np.array_equal, map(np.array, plain.state), map(np.array, recorded.state)))


@pytest.mark.parametrize("keep", [0, ROWS + 1, -1])
def test_a_replay_of_other_rows_is_refused(keep):
    heads = GEOMETRIES["odd"]
    unit = bound(heads, ReferenceKernels())
    _, rows = unit(inputs_of(heads, ROWS), Store(state_of(heads)), Phase.DECODE, record=True)
    with pytest.raises(ShapeError, match=f"{keep} rows cannot be kept of 13"):
        rows.replay(keep)


def test_no_state_is_written_into(heads, unit):
    inputs, state = inputs_of(heads, ROWS), state_of(heads)
    store = Store(state)
    before = [np.array(part) for part in state]
    _, rows = unit(inputs, store, Phase.DECODE, record=True)
    middle, kept = store.state, [np.array(part) for part in store.state]
    unit(inputs, store, Phase.DECODE)
    rows.replay(3)
    assert all(map(np.array_equal, map(np.array, state), before))
    assert all(map(np.array_equal, map(np.array, middle), kept))


def test_the_tail_does_not_hold_on_to_a_chunk():
    heads = GEOMETRIES["odd"]
    unit = bound(heads, ReferenceKernels())
    store = Store(heads.zero_state())
    mx.eval(store.state)
    held = mx.get_active_memory()
    unit(inputs_of(heads, 4096), store, Phase.PREFILL)
    mx.eval(store.state)
    grown = mx.get_active_memory() - held
    assert grown < 4096 * heads.channels


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 150])
def test_chunks_equal_the_loop(heads, rows):
    q, recorded, log_decay = rule_inputs(heads, rows)
    y, S = delta_rule_reference(q, recorded)
    z, R = delta_chunks_reference(q, recorded, log_decay)
    close(np.array(z), np.array(y))
    close(np.array(R), np.array(S))


def test_long_prefills_of_a_gpu_go_by_chunks_and_decode_row_by_row(monkeypatch):
    heads = GEOMETRIES["odd"]
    monkeypatch.setattr("turbospark.nn.delta_net.on_cpu", lambda: False)
    unit, inputs, state = bound(heads, ReferenceKernels()), inputs_of(heads, 99), state_of(heads)
    decoded = run(unit, inputs, state, [99])
    filled = run(unit, inputs, state, [71, 28], Phase.PREFILL)
    close(filled[0], decoded[0], 1e-4)
    close(filled[1][1], decoded[1][1])
    assert not np.array_equal(filled[1][1], decoded[1][1])
    short = run(unit, inputs, state, [9] * 11, Phase.PREFILL)
    assert np.array_equal(short[1][1], decoded[1][1])


def test_chunks_survive_a_key_that_repeats():
    heads = GEOMETRIES["real_heads"]
    q, rows, log_decay = rule_inputs(heads, 64)
    same = DeltaRows(
        rows.state, rows.qkv, mx.broadcast_to(rows.k[:1], rows.k.shape), rows.v,
        mx.ones(rows.decay.shape), 0.999 * mx.ones(rows.beta.shape), rows.fold,
    )  # fmt: skip
    y, S = delta_rule_reference(q, same)
    z, R = delta_chunks_reference(q, same, mx.zeros(log_decay.shape))
    close(np.array(z), np.array(y), 1e-4)
    close(np.array(R), np.array(S), 1e-4)


def test_a_large_step_is_no_overflow(body):
    heads = GEOMETRIES["odd"]
    inputs = inputs_of(heads, 3)
    inputs = type(inputs)(inputs.qkv, inputs.z, inputs.b * 200, inputs.a + 300.0)
    slow = mx.array([-200.0, 0.0, 1.0, -1.0, 0.5, -0.5])  # the first head never forgets
    weights = dataclasses.replace(weights_of(heads), log_rate=slow)
    unit = DeltaNetStep(heads, lambda: weights)
    unit.bind(kernels_of(body))
    y, state = run(unit, inputs, state_of(heads), [3])
    assert np.isfinite(y).all()
    assert np.isfinite(state[1]).all()


def test_weights_of_other_sizes_are_refused():
    weights = weights_of(GEOMETRIES["odd"])
    for heads in (DeltaGeometry(3, 6, 7, 5, 3), DeltaGeometry(4, 6, 7, 5, 4)):
        with pytest.raises(ShapeError, match="delta-net weights"):
            DeltaNetStep(heads, lambda: weights).bind(ReferenceKernels())


def rule_inputs(heads, rows, seed=9):
    rng = np.random.default_rng(seed)
    Hk, Hv, Dk, Dv = heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim
    q, k = (rng.normal(size=(rows, Hk, Dk)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, beta = rng.normal(size=(rows, Hv, Dv)), rng.uniform(0.05, 0.95, size=(rows, Hv))
    log_decay = -rng.exponential(0.3, size=(rows, Hv))
    q, k, v, beta, log_decay = (mx.array(x.astype(np.float32)) for x in (q, k, v, beta, log_decay))
    qkv = mx.zeros((rows, heads.channels))
    recorded = DeltaRows(state_of(heads), qkv, k, v, mx.exp(log_decay), beta, fold_reference)
    return q, recorded, log_decay


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_sigmoid_gate_equals_float64(body, rows):
    heads = GEOMETRIES["odd"]
    unit, inputs = bound(heads, kernels_of(body), "sigmoid"), inputs_of(heads, rows)
    state = state_of(heads)
    got, _ = run(unit, inputs, state, [rows])
    wanted, _, _ = exact_step(heads, weights_of(heads, gate="sigmoid"), inputs, state)
    other, _, _ = exact_step(heads, weights_of(heads), inputs, state)
    assert np.abs(got - wanted).max() < 1e-5 < np.abs(wanted - other).max()

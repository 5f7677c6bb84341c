"""The delta net on GPUs against float64; passes of any size are one computation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from kernels.cases_delta_net import some_rows, state_of
from kernels.cases_gpu import BACKWARDS, EMULATION, TARGETS, mutated, resolve
from kernels.cases_gpu_delta import BOUNDS, CASES, DeltaCase
from kernels.cuda_source import noting
from kernels.placed import placed
from metal_emu import MetalRunError, require_emulator

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.delta_net import bind_delta_net, delta_net, takes
from turbospark.kernels.gpu.delta_scan import ScanGeometry, delta_scan
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.target import DeltaGeometry, DeltaInputs
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_follow_the_formula(case: DeltaCase, target: str) -> None:
    rows_error, state_error = case.errors(_gpu(target))
    assert rows_error < BOUNDS[case.dtype]
    assert state_error < BOUNDS[mx.float32]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("sizes", [[1] * 13, [2, 11], [8, 5], [10, 3]])
@pytest.mark.parametrize("case", [replace(CASES[5], is_stacked=True)], ids=str)
def test_passes_of_any_size_are_one_computation(
    case: DeltaCase, sizes: list[int], target: str
) -> None:
    gpu, inputs, weights = _gpu(target), case.inputs(), case.weights()
    whole, after, _ = case.run(gpu)
    state, at, parts = state_of(case.heads), 0, []
    for size in sizes:
        rows = some_rows(inputs, at, at + size)
        y, state, _ = delta_net(rows, state, case.heads, weights, target=gpu)
        parts.append(y)
        at += size
    assert mx.array_equal(mx.concatenate(parts), whole)
    assert all(map(mx.array_equal, state, after))


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [replace(CASES[2], T=6), replace(CASES[4], T=11)], ids=str)
def test_a_replay_leaves_what_a_shorter_pass_leaves(case: DeltaCase, target: str) -> None:
    gpu, inputs, weights = _gpu(target), case.inputs(), case.weights()
    plain, state, _ = case.run(gpu)
    recorded, same, rows = case.run(gpu, record=True)
    assert rows is not None
    assert mx.array_equal(plain, recorded)
    assert all(map(mx.array_equal, state, same))
    for keep in (1, case.T // 2, case.T):
        _, wanted, _ = delta_net(
            some_rows(inputs, 0, keep), state_of(case.heads), case.heads, weights, target=gpu
        )
        assert all(map(mx.array_equal, rows.like(rows.arrays()).replay(keep), wanted))


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    for case in (CASES[1], CASES[4]):
        (y, state, _), (z, other, _) = case.run(EMULATION), case.run(BACKWARDS)
        assert mx.array_equal(y, z)
        assert all(map(mx.array_equal, state, other))


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("cut", [ScanGeometry(1, 2, 2), ScanGeometry(4, 1, 8)])
def test_a_cut_of_the_scan_does_not_change_a_bit(cut: ScanGeometry, target: str) -> None:
    case, gpu = CASES[6], _gpu(target)
    wanted, state, _ = case.run(gpu)
    made, other, _ = delta_net(
        case.inputs(), state_of(case.heads), case.heads, case.weights(), target=gpu, scan=cut
    )
    assert mx.array_equal(made, wanted)
    assert all(map(mx.array_equal, state, other))


@pytest.mark.parametrize("target", TARGETS[1:])
def test_no_state_is_written_into(target: str) -> None:
    case = CASES[2]
    state = state_of(case.heads)
    before = [mx.array(part) + 0 for part in state]
    mx.eval(before)
    y, after, _ = delta_net(case.inputs(), state, case.heads, case.weights(), target=_gpu(target))
    mx.eval(y, after)
    assert all(map(mx.array_equal, state, before))


VECTORS = "#define VECTOR_ALIGNED(p, bytes) (reinterpret_cast<size_t>(p) % (bytes) == 0)\n"


def on_vectors(before: int, old: str = "", new: str = "") -> GpuTarget:
    """The emulation with CUDA's cut and loads of whole taps, which begin `before` numbers late."""
    require_emulator()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        assert old in names["header"]
        names["header"] = VECTORS + names["header"].replace(old, new)
        return EMULATION.builder(**names)

    return placed(replace(EMULATION, name="cuda", builder=build), ["conv"], before)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("taps", [2, 3, 4, 8])
@pytest.mark.parametrize("case", [CASES[2], CASES[1], replace(CASES[6], T=8)], ids=str)
def test_taps_that_are_loaded_together_give_the_same_bits(
    case: DeltaCase, taps: int, before: int
) -> None:
    case = replace(case, heads=replace(case.heads, taps=taps))
    (y, state, _), (wanted, after, _) = case.run(on_vectors(before)), case.run(EMULATION)
    assert mx.array_equal(y, wanted)
    assert all(map(mx.array_equal, state, after))


@pytest.mark.parametrize(
    ("before", "old", "new"),
    [
        (0, "(16 * (tap % 2))", "(16 * (1 - tap % 2))"),
        (0, "taps.words.v[tap / 2]", "taps.words.v[0]"),
        (1, "bits[2 * i + 1]", "bits[2 * i]"),
    ],
)
def test_a_mutation_of_taps_that_are_loaded_together_is_caught(
    before: int, old: str, new: str
) -> None:
    y, _, _ = CASES[2].run(on_vectors(before, old, new))
    assert not mx.array_equal(y, CASES[2].run(EMULATION)[0])


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize(
    ("case", "kernel", "old", "new", "what"),
    [
        (1, "delta_net", BARRIER, "", "race on|uninitialised"),
        (1, "delta_net", "head % (HV / HK) == 0", "true", "conflicting"),
        (1, "delta_net", "if (within == 0 && row < DV)", "if (within == 0)", "out of|race|confl"),
        (1, "delta_net", "if (row < DV) {", "{", "out of bounds|conflicting"),
        (2, "delta_net", "head / (HV / HK)", "head % HK", "conflicting|never written"),
        (2, "delta_net", "if (part == 0) { scale = scale * query_scale; }", "", None),
        (2, "delta_net", "+ 1e-6f", "+ 1e-1f", None),
        (1, "delta_net", "out.v[set]) * strength", "out.v[set])", None),
        (1, "delta_net", "eps = numbers[0];", "", None),
        (2, "delta_net", "m, tap, i);", "m, 0, i);", None),
        (2, "delta_net", "if (m == M - 1 && (", "if (m == 0 && (", None),
        (1, "delta_net", "|| !is_late", "", "never written"),
        (2, "delta_net", "if (is_late)", "if (false)", "never written"),
        (2, "delta_net", "a_strides[0]", "b_strides[0] * 0", None),
        (4, "delta_scan", BARRIER, "", "race on|uninitialised"),
        (4, "delta_scan", "const int present = 1 - buffer;", "const int present = buffer;",
         "race on|uninitialised"),
        (4, "delta_scan", "* strength", "", None),
        (4, "delta_scan", "within == 0 && row < DV", "within == 0", "out of bounds|conflicting"),
        (4, "delta_filter", "item < rows * heads", "true", "conflicting|out of bounds"),
        (4, "delta_filter", "rows + slot", "rows - 1 + slot", None),
        (4, "delta_gate", "* static_cast<float>(norm_weight[d])", "", None),
    ],
)  # fmt: skip
def test_a_planted_mutation_is_caught(
    case: int, kernel: str, old: str, new: str, what: str | None
) -> None:
    target = mutated(kernel, old, new)
    if what is not None:
        with pytest.raises(MetalRunError, match=what):
            CASES[case].errors(target)
        return
    rows_error, state_error = CASES[case].errors(target)
    caught = not rows_error < BOUNDS[CASES[case].dtype]
    assert caught or not state_error < BOUNDS[mx.float32]


def test_layers_without_a_body_run_the_reference() -> None:
    case = CASES[0]
    weights = case.weights()
    for heads in (
        DeltaGeometry(3, 6, 7, 5, 4),
        DeltaGeometry(3, 6, 12, 5, 1),
        DeltaGeometry(1, 1, 1024, 5, 4),
    ):
        assert not takes(heads, weights)
        assert bind_delta_net(heads, weights, EMULATION) is None
    assert not takes(case.heads, replace(weights, norm=Norm(None, 1e-6)))


def test_shapes_that_have_no_body_are_refused() -> None:
    case = CASES[0]
    inputs, state, weights = case.inputs(), state_of(case.heads), case.weights()

    def run(inputs: DeltaInputs = inputs, state=state, heads: DeltaGeometry = case.heads) -> None:
        delta_net(inputs, state, heads, weights, target=EMULATION)

    with pytest.raises(ShapeError, match="takes no projections"):
        run(replace(inputs, z=inputs.b))
    with pytest.raises(ShapeError, match="takes no projections"):
        run(some_rows(inputs, 0, 0))
    with pytest.raises(ShapeError, match="takes a float32 state"):
        run(state=(state[0], state[1].swapaxes(1, 2)))
    with pytest.raises(ShapeError, match="takes a float32 state"):
        run(state=(state[0].astype(mx.float16), state[1]))
    with pytest.raises(ShapeError, match="delta-net weights"):
        run(heads=DeltaGeometry(3, 6, 12, 7, 4))


def test_a_compiled_step_serves_every_state() -> None:
    launched: list[str] = []
    target = noting(lambda names, _: launched.append(names["name"]))
    case = CASES[2]
    run = bind_delta_net(case.heads, case.weights(), replace(target, prelude="metal.h", own=""))
    assert run is not None
    inputs = case.inputs()

    @mx.compile
    def step(qkv: mx.array, state: list[mx.array]):
        y, after, rows = run(replace(inputs, qkv=qkv), tuple(state), Phase.DECODE, True)
        assert rows is not None
        return y, list(after), list(rows.arrays())

    state = list(state_of(case.heads))
    for _ in range(5):
        y, state, _ = step(inputs.qkv, state)
        mx.eval(y, state)
    assert launched == ["delta_net_record"]


def test_a_fold_alone_gives_no_rows() -> None:
    require_emulator()
    _, (_, wanted), rows = CASES[1].run(EMULATION, record=True)
    assert rows is not None
    made = delta_scan(rows.state[1], None, (rows.k, rows.v, rows.decay, rows.beta), EMULATION)
    assert len(made) == 1
    assert mx.array_equal(made[0], wanted)


def _gpu(name: str) -> GpuTarget:
    target = resolve(name)
    assert target is not None
    return target

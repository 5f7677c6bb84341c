"""What launches bring near for the next one is learnt, stays in a bundle and changes no result."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, int4_weights, load_golden
from kernels.cases_delta_net import state_of
from kernels.cases_gpu import EMULATION, resolve, tensor_emulation
from kernels.cases_gpu_delta import CASES as DELTA_CASES
from kernels.cases_gpu_delta import DeltaCase
from kernels.cases_gpu_rotated import CASES as ROTATED_CASES
from kernels.cases_gpu_rotated import RotatedCase
from kernels.matrices import quantized
from metal_emu import MetalRunError, metal_kernel, require_emulator

from turbospark.kernels.gpu import ahead as ahead_module
from turbospark.kernels.gpu import target as target_module
from turbospark.kernels.gpu.ahead import (
    AHEAD_BLOCKS,
    AHEAD_PIECE,
    Ahead,
    Follower,
    LaunchOrder,
    reads_ahead,
)
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.delta_net import Beside, delta_net
from turbospark.kernels.gpu.kernel import GpuTarget, header, strip_comments
from turbospark.kernels.gpu.rotated_attention import rotated_attention
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.kernels.weights import QuantizedWeight
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

SILENT = "FUNC void fetch_bytes(const GLOBAL void*, uint) {}"
READING = """FUNC void fetch_bytes(const GLOBAL void* p, uint bytes) {
  const GLOBAL uint* words = reinterpret_cast<const GLOBAL uint*>(p);
  volatile uint read = words[0];
  read = words[bytes / 4 - 1];
}"""
COUNTING = """FUNC void fetch_bytes(const GLOBAL void* p, uint bytes) {
  const_cast<GLOBAL uint*>(reinterpret_cast<const GLOBAL uint*>(p))[0] += bytes;
}"""
PLACES = [
    ("", ""),
    ("place * BLOCKS + block", "place * BLOCKS"),
    ("place * BLOCKS + block", "place + block"),
    ("threads * BLOCKS", "threads"),
    ("thread_index % 32 * (threads / 32)", "thread_index"),
    ("piece * (PIECE / 4)", "piece * PIECE"),
    ("piece < BYTES / PIECE", "piece <= BYTES / PIECE"),
]
"""Nothing, then changes of who asks for what."""


def bundle(count: int = 1) -> tuple[Bundle, list[QuantizedWeight]]:
    weights = [quantized(64, 4096, 4, 64)[0] for _ in range(count)]
    arrays = [x for w in weights for x in (w.codes, w.scales, w.biases) if x is not None]
    return Bundle.of(arrays), weights


def reading(target: GpuTarget) -> GpuTarget:
    """The target, where what is brought near is read, so that bounds are looked at."""
    require_emulator()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        assert SILENT in names["header"]
        names["header"] = names["header"].replace(SILENT, READING)
        return target.builder(**names)

    return replace(target, builder=build)


def gpu(name: str) -> GpuTarget:
    if name == "cuda":
        found = resolve(name)
        assert found is not None
        return found
    return reading(tensor_emulation() if name == "tensor" else replace(EMULATION, own="cuda"))


def words(pieces: int, first: int = 64) -> Ahead:
    """All that lies behind the first words of an array."""
    return Ahead(mx.zeros((first + pieces * AHEAD_PIECE // 4,), mx.uint32), first,
                 pieces * AHEAD_PIECE)  # fmt: skip


def of_delta(case: DeltaCase, target: GpuTarget, ahead: Ahead | None) -> list[mx.array]:
    made = delta_net(case.inputs(), state_of(case.heads), case.heads, case.weights(), record=True,
                     target=target, beside=Beside(ahead=ahead))  # fmt: skip
    y, state, rows = made
    assert rows is not None
    return [y, *state, *rows.arrays()]


def of_attention(case: RotatedCase, target: GpuTarget, ahead: Ahead | None) -> list[mx.array]:
    y, tail = rotated_attention(
        case.inputs(), case.step_rows(), case.layer(), target=target, ahead=ahead
    )
    count = case.start - case.boundary + case.T
    return [y, *([] if tail is None else [tail.k[:, :count], tail.v[:, :count]])]


@pytest.mark.parametrize("name", ["emulation", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", [c for c in DELTA_CASES if c.T <= 8], ids=str)
def test_a_delta_net_gives_the_same_bits(case: DeltaCase, name: str) -> None:
    target = gpu(name)
    found, wanted = (of_delta(case, target, ahead) for ahead in (words(150), None))
    assert all(map(mx.array_equal, found, wanted))


@pytest.mark.parametrize("name", ["tensor", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", ROTATED_CASES, ids=str)
def test_attention_gives_the_same_bits(case: RotatedCase, name: str) -> None:
    target = gpu(name)
    found, wanted = (of_attention(case, target, ahead) for ahead in (words(150), None))
    assert all(map(mx.array_equal, found, wanted))


@pytest.mark.parametrize("pieces", [1, 40, 70, 1500])
def test_all_is_brought_near_and_nothing_behind_it(pieces: int) -> None:
    delta, attention = DELTA_CASES[0], ROTATED_CASES[5]
    whole = words(pieces)
    short = replace(whole, words=whole.words[:-1])
    of_delta(delta, gpu("emulation"), whole)
    with pytest.raises(MetalRunError, match="out of bounds"):
        of_delta(delta, gpu("emulation"), short)
    of_attention(attention, gpu("tensor"), whole)
    with pytest.raises(MetalRunError, match="out of bounds"):
        of_attention(attention, gpu("tensor"), short)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("head - HV", "head - HV - 1"),
        ("head - HV", "head - HV + 1"),
        (" - COPIES - AHEAD_LAYERS", " - COPIES"),
        (" - splits - COPIES", " - splits"),
        ("layer * width + ", "layer + "),
    ],
)
def test_a_mutation_of_a_body_is_caught(old: str, new: str) -> None:
    """It changes results, or what lies last is not asked for."""
    is_delta = old.startswith("head")
    target = gpu("emulation" if is_delta else "tensor")
    long = RotatedCase(2, (4, 2), 64, 290, 256, sealed=256, dtype=mx.bfloat16)

    def run(target: GpuTarget, ahead: Ahead | None) -> list[mx.array]:
        if is_delta:
            return of_delta(DELTA_CASES[0], target, ahead)
        return of_attention(long, target, ahead)

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if names["name"].endswith("_ahead"):
            assert old in names["source"]
            names["source"] = names["source"].replace(old, new)
        return target.builder(**names)

    whole, mutant = words(AHEAD_BLOCKS), replace(target, builder=build)
    wanted, is_caught = run(target, None), False
    try:
        is_caught = not all(map(mx.array_equal, run(mutant, whole), wanted))
        run(mutant, replace(whole, words=whole.words[:-1]))
        is_caught = True
    except MetalRunError as error:
        is_caught |= "out of bounds" not in str(error) or "ahead" not in str(error)
    assert is_caught


@pytest.mark.parametrize("change", PLACES[1:])
def test_a_mutation_of_shares_is_caught(change: tuple[str, str]) -> None:
    with pytest.raises((AssertionError, MetalRunError)):
        ask_for_pieces(500, 3, change)


@pytest.mark.parametrize(("pieces", "blocks"), [(1, 3), (7, 3), (500, 3), (500, 2)])
def test_each_piece_is_asked_for_once(pieces: int, blocks: int) -> None:
    ask_for_pieces(pieces, blocks, PLACES[0])


def ask_for_pieces(pieces: int, blocks: int, change: tuple[str, str]) -> None:
    """By `blocks` threadgroups of 64 threads behind two that work."""
    require_emulator()
    text = resources.files("turbospark.kernels.gpu").joinpath("dialect/ahead.h").read_text("ascii")
    assert change[0] in text
    text = text.replace(*change)
    silent = header(EMULATION)
    assert SILENT in silent
    kernel = metal_kernel(
        "asks",
        ["x"],
        ["y"],
        """const int block = static_cast<int>(threadgroup_position_in_grid.x) - 2;
        BRING_NEAR(y, block, static_cast<int>(thread_position_in_threadgroup.x), 64)
        """,
        header=silent.replace(SILENT, COUNTING) + strip_comments(text),
        strict=True,
    )
    sizes = {"AHEAD_WORD": 8, "AHEAD_PIECE": 16, "AHEAD_BYTES": 16 * pieces,
             "AHEAD_BLOCKS": blocks, "AHEAD_WAIT": 0}  # fmt: skip
    (found,) = kernel(
        inputs=[mx.zeros((8,))],
        template=[*sizes.items()],
        grid=((2 + blocks) * 64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(8 + 4 * pieces + 8,)],
        output_dtypes=[mx.uint32],
        init_value=0,
    )
    wanted = np.zeros((8 + 4 * pieces + 8,), np.uint32)
    wanted[8 : 8 + 4 * pieces : 4] = 16
    np.testing.assert_array_equal(np.array(found), wanted)


def test_many_threadgroups_bring_nothing_near(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("delta_net", "rotated_attention"):
        monkeypatch.setattr(f"turbospark.kernels.gpu.{module}.MOST_BLOCKS", 0)
    launches: list[str] = []
    of_delta(DELTA_CASES[0], noting(EMULATION, launches), words(1))
    of_attention(ROTATED_CASES[5], noting(tensor_emulation(), launches), words(1))
    assert launches == ["delta_net_record", "rotated_tensor_gated"]


def test_an_order_is_learnt_from_a_pass() -> None:
    order, units = LaunchOrder(), [Follower(), Follower()]
    (one, (first, second)), (other, (third,)) = bundle(2), bundle()
    for turn in range(2):
        asked = [order.turn(units[0])]
        order.reads(one, second)
        order.reads(one, first)
        asked.append(order.turn(units[1]))
        order.reads(other, third)
        assert [ahead is not None for ahead in asked] == [turn > 0] * 2
        if turn > 0:
            assert asked[0] is not None
            assert asked[0].words is one.words
            assert asked[0].first == one.place(second.codes)
            assert asked[0].nbytes <= 4 * (one.words.size - asked[0].first)
            assert asked[1] is not None
            assert (asked[1].words is other.words, asked[1].first) == (True, 0)


def test_a_wrong_guess_is_corrected() -> None:
    order, unit, (home, (weight,)) = LaunchOrder(), Follower(), bundle()
    for read, wanted in (
        ((home, weight), False), ((), True), ((home, weight), False), ((None, weight), True),
        ((home, quantized(64, 64, 4, 64)[0]), False), ((home, weight), False),
    ):  # fmt: skip
        assert (order.turn(unit) is not None) == wanted
        order.reads(*read)
    assert order.turn(unit) is not None
    assert order.turn(unit) is not None  # nothing was read between


def test_orders_of_two_models_do_not_mix() -> None:
    (one, (first,)), (other, (second,)) = bundle(), bundle()
    orders, units = [LaunchOrder(), LaunchOrder()], [Follower(), Follower()]
    for _ in range(2):
        asked = [order.turn(unit) for order, unit in zip(orders, units, strict=True)]
        orders[1].reads(other, second)
        orders[0].reads(one, first)
    assert [ahead is not None and ahead.words for ahead in asked] == [one.words, other.words]


def test_pieces_are_whole_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    order, unit, (home, (weight,)) = LaunchOrder(), Follower(), bundle()
    order.turn(unit)
    order.reads(home, weight)
    everything = 4 * home.words.size
    for most, piece in ((everything + 1, 4096), (20_000, 4096), (20_000, 8192), (4095, 4096)):
        monkeypatch.setattr(ahead_module, "AHEAD_BYTES", most)
        monkeypatch.setattr(ahead_module, "AHEAD_PIECE", piece)
        found = order.turn(unit)
        assert (0 if found is None else found.nbytes) == min(most, everything) // piece * piece


def noting(target: GpuTarget, launches: list[str]) -> GpuTarget:
    require_emulator()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        launch = target.builder(**names)

        def noted(**call: Any) -> Sequence[mx.array]:
            launches.append(names["name"])
            return launch(**call)

        return noted

    return replace(target, builder=build)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_s_steps_bring_near_what_its_prefill_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, found = load_golden(name), list[np.ndarray]()
    monkeypatch.setattr(target_module, "reads_ahead", lambda: True)
    monkeypatch.setattr(ahead_module, "AHEAD_PIECE", 256)
    for disabled in ("", ",weights_ahead"):
        launches: list[str] = []
        target = noting(gpu("emulation"), launches)
        policy = KernelPolicy(disable_kernels="int4_mma,int4_chain" + disabled)
        model = build_model(golden.config, int4_weights(golden), GpuKernels(target, policy))
        caches = model.make_caches(64, 16)
        feed(model, golden.tokens[:9], [9], caches=caches)
        assert not any(name.endswith("_ahead") for name in launches)
        found.append(feed(model, golden.tokens[9:11], [1, 1], caches=caches, phase=Phase.DECODE))
        assert ("delta_net_ahead" in launches) == (not disabled)
        assert ("delta_net" in launches) == bool(disabled)
    np.testing.assert_array_equal(*found)


def test_a_cpu_reads_nothing_ahead() -> None:
    if mx.default_device() == mx.cpu:
        assert not reads_ahead()

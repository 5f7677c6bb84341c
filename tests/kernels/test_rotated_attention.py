"""Norms, rotation, rows, attention and gate in one launch: the bits of one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from golden.tiny import TINY, tiny_model
from kernels.cases_gpu import (
    BACKWARDS,
    EMULATION,
    ROUNDING,
    TARGETS,
    mutated,
    resolve,
    tensor_emulation,
)
from kernels.cases_gpu_rotated import BF16, CASES, RotatedCase
from kernels.cuda_source import noting
from kernels.matrices import relative_error
from metal_emu import MetalRunError, require_emulator

from turbospark.caches.step import StepCache
from turbospark.errors import ShapeError
from turbospark.kernels.attention import attend_step_reference, gated_reference
from turbospark.kernels.gpu import attention_geometry
from turbospark.kernels.gpu.attention_geometry import Chunks
from turbospark.kernels.gpu.head_norm_rope import head_norm_rope_reference
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rotated_attention import HeadInputs, rotated_attention
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.nn.attention import RotatedAttention
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel
from turbospark.settings import KernelPolicy

SLACK = 8
GPUS = [*TARGETS[1:], "tensor"]


def on(name: str) -> GpuTarget:
    target = tensor_emulation() if name == "tensor" else resolve(name)
    assert target is not None
    return target


def held(case: RotatedCase, tail: RowBlock) -> list[mx.array]:
    count = case.start - case.boundary + case.T
    return [tail.k[:, :count], tail.v[:, :count]]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_launch_gives_the_bits_of_two(case: RotatedCase, target: str) -> None:
    gpu = on(target)
    (y, tail), (wanted, wanted_tail) = case.run(gpu, bundled=case.T < 4), case.apart(gpu)
    assert mx.array_equal(y, wanted)
    assert (tail is None) == (wanted_tail is None) == (not case.has_kv)
    if tail is not None and wanted_tail is not None:
        for one, other in zip(held(case, tail), held(case, wanted_tail), strict=True):
            assert mx.array_equal(one, other)


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", CASES[1::2], ids=str)
def test_it_is_what_operations_make_of_it(case: RotatedCase, target: str) -> None:
    y, _ = case.run(on(target))
    x, rows = case.inputs(), case.step_rows()
    wide = HeadInputs(*(None if a is None else mx.contiguous(a) for a in (x.q, x.k, x.v)))
    q, k, v = head_norm_rope_reference(wide.q, wide.k, wide.v, case.start, case.layer().unit)
    tail, sealed = rows.tail, rows.sealed
    if k is not None and v is not None:
        at = mx.array([case.start - case.boundary])
        tail = RowBlock(
            *(
                mx.slice_update(old, new.swapaxes(0, 1).astype(old.dtype), at, axes=[1])
                for old, new in ((rows.tail.k, k), (rows.tail.v, v))
            )
        )
        sealed = tail if rows.sealed is rows.tail else sealed
    layer = case.layer().layer
    finite = [
        RowBlock(*(mx.where(mx.isnan(a), 0, a) for a in (block.k, block.v)))
        for block in (sealed, tail)
    ]
    if sealed is tail:
        finite[0] = finite[1]
    step = StepRows(finite[0], finite[1], rows.lengths)
    wanted = attend_step_reference(
        q.astype(mx.float32), step, layer.scale, layer.window, layer.sinks
    )
    if x.gate is not None:
        gate = x.gate if case.gate == "head" else x.gate[..., : case.D]
        shape = gate.shape if case.gate == "head" else wanted.shape
        flat = x.gate if case.gate != "wide" else mx.reshape(gate, shape)
        wanted = gated_reference(wanted, flat.astype(mx.float32))
    assert y.dtype == case.dtype
    assert relative_error(y.astype(mx.float32), np.array(wanted)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("case", [CASES[3], CASES[5], CASES[7], CASES[9]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: RotatedCase, target: str) -> None:
    gpu, layer = on(target), case.layer()
    together, block = case.run(gpu)
    assert block is not None
    x, rows = case.inputs(), case.step_rows()
    for t in range(case.T):
        own = (None if a is None else a[t : t + 1] for a in (x.q, x.k, x.v, x.gate))
        y, tail = rotated_attention(HeadInputs(*own), rows, layer, target=gpu)
        assert mx.array_equal(y, together[t : t + 1])
        assert tail is not None
        sealed = tail if rows.sealed is rows.tail else rows.sealed
        rows = StepRows(sealed, tail, rows.lengths + mx.array([0, 1], mx.int32))
    for one, other in zip(held(case, rows.tail), held(case, block), strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("target", ["emulation", "tensor"])
@pytest.mark.parametrize("gate", ["", "full"])
def test_a_text_that_outgrows_one_chunk_sees_the_same_bits(gate: str, target: str) -> None:
    case = RotatedCase(3, (4, 2), 64, 101, 0, gate=gate, dtype=BF16)
    rows, gpu, layer = case.step_rows(), on(target), case.layer()
    more = RowBlock(*(mx.zeros((2, 512, 64), BF16) for _ in range(2)))
    launches: list[str] = []
    found = [
        rotated_attention(case.inputs(), step, layer, target=counted(gpu, launches))[0]
        for step in (rows, rows._replace(sealed=more))
    ]
    assert mx.array_equal(*found)
    assert [name.split("_")[0] for name in launches] == ["rotated", "rotated", "attention"]


def counted(gpu: GpuTarget, launches: list[str]) -> GpuTarget:
    """The target, whose kernels note their names."""

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        launch = gpu.builder(**names)

        def noted(**call: Any) -> Sequence[mx.array]:
            launches.append(names["name"])
            return launch(**call)

        return noted

    return replace(gpu, builder=build)


@pytest.mark.parametrize("disabled", ["", "rotated_attention", "attention_decode"])
def test_a_unit_takes_one_launch_in_a_step(disabled: str) -> None:
    case = RotatedCase(3, (4, 2), 32, 37, 0, gate="full", tail=64)
    x, rows, launches = case.inputs(), case.step_rows(), list[str]()
    rows = rows._replace(tail=RowBlock(*(mx.where(mx.isnan(a), 0, a) for a in (
        rows.tail.k, rows.tail.v))))  # fmt: skip
    rows = rows._replace(sealed=rows.tail)
    require_emulator()
    found = []
    for target in (counted(EMULATION, launches), None):
        unit = RotatedAttention(
            HeadGeometry(4, 2, 32), Rope.build("default", 1e4, 32), scale=0.3, v_norm=None
        )
        if target is not None:
            unit.bind(GpuKernels(target, KernelPolicy(disable_kernels=disabled)))
        cache = StepCache(rows)
        found.append(unit(x.q, x.k, x.v, cache, Phase.DECODE, x.gate))
        assert int(cache.offset) == 40
    np.testing.assert_allclose(np.array(found[0]), np.array(found[1]), atol=1e-5)
    wanted = {
        "": ["rotated_partials_gated"],
        "rotated_attention": ["head_norm_rope", "attention_partials"],
        "attention_decode": ["head_norm_rope"],
    }
    assert launches == wanted[disabled]


@pytest.mark.parametrize("name", ["gemma4_text", "spark2_5", "qwen3_5"])
def test_a_family_s_step_gives_the_bits_of_an_eager_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, layers that share rows, gates of heads and of numbers; rows are sealed between."""
    require_emulator()
    monkeypatch.setattr(mx, "compile", lambda run: run)
    sizes = {"head_dim": 16, "global_head_dim": 24, "partial_rotary_factor": 0.5}
    model = tiny_model(name, **{key: n for key, n in sizes.items() if key in TINY[name]})
    launches: list[str] = []
    bind_units(model, GpuKernels(counted(EMULATION, launches), KernelPolicy()))
    tokens = mx.array(np.random.default_rng(3).integers(0, 60, size=128).astype(np.int32))
    ours, theirs = (model.make_caches(512, 9) for _ in range(2))
    for caches in (ours, theirs):
        model(tokens[:124], caches, phase=Phase.PREFILL)
    compiled = CompiledModel(model)
    for begin, end in ((124, 125), (125, 128)):
        own, wish = tokens[begin:end], {"phase": Phase.DECODE, "logits": "all"}
        launches.clear()
        got = compiled(own, ours, **wish).logits
        assert not {"head_norm_rope", "attention_partials"} & {*launches}
        assert any(launch.startswith("rotated_partials") for launch in launches)
        assert mx.array_equal(got, model(own, theirs, **wish).logits)


def test_a_body_that_cannot_be_built_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    require_emulator()
    launches: list[str] = []

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if names["name"].startswith("rotated"):
            raise RuntimeError("out of registers")
        return counted(EMULATION, launches).builder(**names)

    heads, case = HeadGeometry(4, 2, 32), RotatedCase(2, (4, 2), 32, 37, 0, norms="---")
    unit = RotatedAttention(heads, Rope.build("default", 1e4, 32), scale=0.3)
    unit.bind(GpuKernels(GpuTarget("metal", "metal.h", build), KernelPolicy()))
    x, rows = case.inputs(), case.step_rows()
    found = unit(x.q, x.k, x.v, StepCache(rows), Phase.DECODE)
    assert launches == ["head_norm_rope", "attention_partials"]
    assert "rotated_attention cannot run for 2 rows of 4 heads of 32" in caplog.text
    assert mx.array_equal(found, case.run(EMULATION)[0])


def test_heads_without_a_body_are_left_to_the_parts() -> None:
    layer = replace(CASES[0].layer().layer, heads=HeadGeometry(3, 3, 10))
    assert GpuKernels(EMULATION, KernelPolicy()).rotated_attention(layer) is None


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    for case in (CASES[3], CASES[7]):
        for one, other in ((EMULATION, BACKWARDS), (tensor_emulation(), tensor_emulation(order=1))):
            (y, tail), (again, block) = case.run(one), case.run(other)
            assert mx.array_equal(y, again)
            assert tail is not None
            assert block is not None
            for first, second in zip(held(case, tail), held(case, block), strict=True):
                assert mx.array_equal(first, second)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n  const float score_factor"
MUTATIONS = [
    ("if (block + 32 > start) {", "if (block > start) {"),
    ("own >= 0", "own > 0"),
    ("own_rows[(M + own) * D", "own_rows[own * D"),
    ("first_query == 0 && position >= chunk", "position >= chunk"),
    ("position >= chunk && position < high", "position >= chunk"),
    ("numbers[4]", "numbers[3]"),
    ("* TILES + tile) * COPY_ROWS", "* TILES) * COPY_ROWS"),
    ("start - boundary - first)", "start - boundary - first - 1)"),
    ("row != turned_row", "turned_row < 0"),
    (BARRIER, "const float score_factor"),
    ("splits - 1 - depth", "splits - depth"),
]


@pytest.mark.parametrize(("old", "new"), MUTATIONS)
def test_a_planted_mutation_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's rows straddle two chunks, in some of which queries fill two tiles."""
    cuts = [Chunks(128, 0), Chunks(512, 0)]
    case = RotatedCase(6, (4, 2), 32, 126, 96, sealed=96, norms="w--")
    cases = [case, replace(case, sealed=0, boundary=0, start=100)]
    target = mutated("rotated_partials", old, new)
    changed = []
    for case, cut in zip(cases, cuts, strict=True):
        monkeypatch.setattr(attention_geometry, "chunks", lambda *_, c=cut, **__: c)
        (wanted, rows) = case.run(EMULATION)
        assert rows is not None
        try:
            y, tail = case.run(target)
        except MetalRunError:
            return
        assert tail is not None
        pairs = [(y, wanted), *zip(held(case, tail), held(case, rows), strict=True)]
        changed += [not mx.array_equal(*pair) for pair in pairs]
    assert any(changed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i / SHARE * static_cast<int>(gate_strides[0])", "0"),
        ("GATE_STEP == 1 ? 0 : n % D", "0"),
        ("head * GATE_STEP", "head * D"),
    ],
)
def test_a_mutation_of_the_gate_is_caught(old: str, new: str) -> None:
    case = replace(CASES[5], T=2, gate="wide")
    wanted, _ = case.run(EMULATION)
    found, _ = case.run(mutated("rotated_partials_gated", old, new))
    assert not mx.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (step + KEYS > start) {", "if (step > start) {"),
        ("item / 8 % 2", "0"),
        ("item % 8 * 4", "item % 4 * 4"),
        ("own_rows + (M + own) * D", "own_rows + own * D"),
        ("joined[n], 0.0f) * row_share[n / D]", "joined[n], 0.0f)"),
        ("first_query == 0 && position >= chunk", "position >= chunk"),
    ],
)
def test_a_mutation_of_the_tensor_body_is_caught(old: str, new: str) -> None:
    cases = [
        RotatedCase(8, (10, 2), 64, 125, 96, sealed=96, dtype=BF16),
        RotatedCase(8, (10, 2), 64, 100, 0, dtype=BF16),
    ]
    assert is_caught(cases, old, new)


LONG = [  # chunks of four steps; rings that end within one, or before what it sees; a late tail
    RotatedCase(8, (10, 2), 64, 500, 384, sealed=384, dtype=BF16),
    RotatedCase(8, (10, 2), 64, 500, 384, sealed=301, window=250, dtype=BF16),
    RotatedCase(8, (10, 2), 64, 500, 384, sealed=301, window=191, dtype=BF16),
    RotatedCase(8, (10, 2), 64, 390, 200, sealed=256, tail=256, dtype=BF16),
]


@pytest.mark.parametrize(
    "case", [*LONG, RotatedCase(1, (2, 1), 512, 130, 128, sealed=128, dtype=BF16)], ids=str
)
def test_numbers_asked_for_a_step_ahead_give_the_same_bits(
    case: RotatedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tensor_emulation()
    monkeypatch.setattr(attention_geometry, "chunks", lambda *_, **__: Chunks(512, 0))
    found: list[mx.array] = []
    for is_ahead in (False, True):
        monkeypatch.setattr(attention_geometry, "loads_ahead", lambda *_, a=is_ahead: a)
        found.append(case.run(target)[0])
    assert mx.all(mx.isfinite(found[0]))
    assert mx.array_equal(*found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("load_keys(next)", "load_keys(step)"),
        ("load_values(next)", "load_values(step)"),
        ("IS_AHEAD && next < high", "IS_AHEAD && next + KEYS < high"),
        ("step >= low && ", ""),
        ("step + KEYS <= high", "true"),
        ("step >= boundary ||", "true ||"),
        ("step + KEYS <= boundary &&", ""),
        ("slot + KEYS <= sealed_capacity", "true"),
        ("slot >= sealed_capacity ||", "true ||"),
        ("(first + 8 * j * D", "(first + 4 * j * D"),
        ("16 * s + x % 2 + x / 2 * 8) * D", "16 * s + x) * D"),
    ],
)
def test_a_mutation_of_what_is_asked_for_ahead_is_caught(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_geometry, "chunks", lambda *_, **__: Chunks(512, 0))
    assert is_caught(LONG, old, new)


def is_caught(cases: list[RotatedCase], old: str, new: str) -> bool:
    """Whether the tensor body gives other bits, or none, with this mutation."""
    target = tensor_emulation()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if names["name"] == "rotated_tensor":
            assert old in names["source"]
            names["source"] = names["source"].replace(old, new)
        return target.builder(**names)

    for case in cases:
        wanted, _ = case.run(target)
        try:
            found, _ = case.run(replace(target, builder=build))
        except MetalRunError:
            return True
        if not mx.array_equal(found, wanted):
            return True
    return False


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("D", attention_geometry.TENSOR_SHAPES)
def test_bounds_follow_from_the_template(D: int, rows: int) -> None:
    """MLX finds a built kernel by its name and template."""
    heads = HeadGeometry(16, 4, D)
    shape = attention_geometry.tensor_shape(heads, rows)
    blocks = attention_geometry.resident_blocks(heads, rows)
    limit = {(64, 1): 4, (128, 1): 4, (256, 1): 2}
    assert blocks == limit.get((D, shape.query_tiles), 0)
    launched: list[tuple[str, dict[str, Any], str]] = []

    def note(names: dict[str, Any], call: dict[str, Any]) -> None:
        launched.append((names["name"], dict(call["template"]), names["header"]))

    case, target = RotatedCase(rows, (16, 4), D, 40, 0, dtype=BF16), noting(note)
    case.apart(target)
    if D * rows < 8 * 512:
        case.run(target)
    for name, template, header in launched[1:]:
        assert name.split("_")[1] == "tensor"
        assert (template["D"], template["QUERY_TILES"]) == (D, shape.query_tiles)
        bounds = f"#define RESIDENT {32 * template['WARPS']}, {blocks}\n"
        assert (bounds in header) == ("__launch_bounds__" in header) == (blocks > 0)


def test_what_has_no_body_is_refused() -> None:
    case = CASES[4]
    with pytest.raises(ShapeError, match="has no body"):
        replace(case, norms="www").run(EMULATION)
    with pytest.raises(ShapeError, match="has no body"):
        replace(case, T=9).run(EMULATION)
    with pytest.raises(ShapeError, match="has no body"):
        replace(case, heads=(2, 1), D=512).run(EMULATION)
    inputs = replace(case.inputs(), gate=mx.zeros((case.T, 3)))
    with pytest.raises(ShapeError, match="do not take gates"):
        rotated_attention(inputs, case.step_rows(), case.layer(), target=EMULATION)

"""The targets metal and cuda as families see them, in emulation and on a real GPU."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, int4_weights, load_golden
from kernels.cases_gpu import EMULATION, TARGETS, emulated, resolve
from kernels.matrices import quantized, relative_error, rows
from metal_emu import require_emulator

from turbospark.caches.ring import RingCache
from turbospark.errors import KernelError, OptionError
from turbospark.kernels.attention import attend_reference
from turbospark.kernels.gpu import attention_prefill
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.target import BODIES, GpuKernels
from turbospark.kernels.select import choose_kernels
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

FAMILIES = [
    *("gemma3_text", "gemma4_ple", "mistral_swa", "qwen3_5_moe", "gemma4_moe"),
    *("muse_glimmer", "spark2_5", "deepseek_v2", "qwen4_exp"),
]
PROMPT, STEPS = 36, [1, 3]
DECODE_BODIES = {
    *("int4_gemv_1", "int4_gemv_pair", "experts_scores", "rms_norm"),
    *("attention_partials", "attention_combine"),
}


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_int4_equals_transformers(name: str, target: str) -> None:
    golden, gpu = load_golden(name), resolve(target)
    assert gpu is not None
    model = build_model(golden.config, int4_weights(golden), GpuKernels(gpu, KernelPolicy()))
    caches = model.make_caches(64, 16)
    prompt = feed(model, golden.tokens[:PROMPT], [PROMPT], caches=caches)
    steps = feed(model, golden.tokens[PROMPT:], STEPS, caches=caches, phase=Phase.DECODE)
    # A GPU's fast exponentials, and TF32 in prefill, are less exact.
    tolerance = golden.tolerance * (1 if target == "emulation" else 20)
    assert golden.difference(np.concatenate([prompt, steps]), "int4") < tolerance


def counting(launched: list[str]) -> GpuTarget:
    """The emulation, noting which bodies are built."""
    require_emulator()

    def build(**names: Any) -> Any:
        launched.append(names["name"])
        return emulated(**names)

    return GpuTarget("emulation", "metal.h", build)


def run_everything(kernels: GpuKernels, phase: Phase, count: int) -> list[mx.array]:
    """One call of each unit that the target binds; quantized and dense weights side by side."""
    K = 64
    four_bit, eight_bit = quantized(7, K, 4, 32)[0], quantized(K, 7 * 32, 8, 32)[0]
    gate, up = (quantized(7 * 32, K, 4, 64, seed=seed)[0] for seed in (1, 2))
    norm, bias, x = Norm(rows(1, K)[0], 1e-6), rows(1, 7)[0], rows(count, K)
    project = kernels.normed_projections(norm, [four_bit, rows(5, K)], [bias, None])
    mlp = kernels.gated_mlp(norm, gate, up, eight_bit, [None] * 3, "silu", norm, True)
    head = kernels.output_head(norm, four_bit, None, 30.0)
    attend = kernels.attend(HeadGeometry(2, 1, 32), 0.2, 40, None)
    assert project is not None
    assert mlp is not None
    assert head is not None
    assert attend is not None
    cache = RingCache(1, 32, max_context=500, window=40, slack=30)
    values = rows(150, 32).reshape(150, 1, 32)
    for start in range(0, 150, 50):
        cache.append(values[start : start + 50], 2 * values[start : start + 50])
    q = rows(count, 64, seed=3).reshape(count, 2, 32)
    return [*project(x, phase), mlp(x, phase), head(x, phase), attend(q, cache, phase)]


@pytest.mark.parametrize(
    ("phase", "count", "expected"),
    [
        (Phase.DECODE, 1, DECODE_BODIES),
        (Phase.DECODE, 8, DECODE_BODIES),
        (Phase.DECODE, 9, {"rms_norm"}),
        (Phase.PREFILL, 5, {"rms_norm"}),
    ],
)
def test_phase_and_rows_decide_which_bodies_run(
    phase: Phase, count: int, expected: set[str]
) -> None:
    launched: list[str] = []
    run_everything(GpuKernels(counting(launched), KernelPolicy()), phase, count)
    assert set(launched) == expected


@pytest.mark.parametrize("name", BODIES)
def test_a_disabled_body_does_not_run_and_changes_nothing(name: str) -> None:
    launched: list[str] = []
    policy = KernelPolicy(disable_kernels=f" {name},")
    found = run_everything(GpuKernels(counting(launched), policy), Phase.DECODE, 3)
    assert launched
    assert not any(built.startswith(name.removesuffix("_decode")) for built in launched)
    wanted = run_everything(GpuKernels(EMULATION, KernelPolicy()), Phase.DECODE, 3)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-4)


def test_a_unit_without_any_body_is_left_to_its_reference() -> None:
    kernels = GpuKernels(EMULATION, KernelPolicy(disable_kernels="rms_norm,int4_gemv"))
    weight = quantized(7, 64, 4, 32)[0]
    assert kernels.normed_projections(Norm(None, 1e-6), [weight], [None]) is None
    assert kernels.projected_residual(weight, None, None) is None


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("window", [40, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefill_attention_equals_the_reference(count: int, window: int, with_sinks: bool) -> None:
    cache = RingCache(2, 32, max_context=500, window=40, slack=13)
    values = rows(150, 64).reshape(150, 2, 32)
    for start in range(0, 150, 25):
        cache.append(values[start : start + 25], 2 * values[start : start + 25])
    q = rows(count, 6 * 32, seed=3).reshape(count, 6, 32)
    sinks = rows(1, 6)[0] if with_sinks else None
    attend = GpuKernels(EMULATION, KernelPolicy()).attend(
        HeadGeometry(6, 2, 32), 0.3, window, sinks
    )
    assert attend is not None
    found = attend(q, cache, Phase.PREFILL)
    wanted = attend_reference(q, cache.rows(), 0.3, window, sinks)
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-5)


@pytest.mark.parametrize(("head_dim", "window"), [(256, None), (32, 40), (136, 7)])
def test_prefill_in_blocks_equals_the_reference(
    head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_prefill, "SCORES", 1)
    cache = RingCache(1, head_dim, max_context=500, window=window or 400, slack=50)
    values = rows(99, head_dim).reshape(99, 1, head_dim)
    cache.append(values[:59], 2 * values[:59])
    cache.append(values[59:], 2 * values[59:])
    q = rows(37, 3 * head_dim, seed=3).reshape(37, 3, head_dim)
    sinks = rows(1, 3)[0]
    found = attention_prefill.attention_prefill(q, cache.rows(), 0.1, window, sinks)
    wanted = attend_reference(q, cache.rows(), 0.1, window, sinks)
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-5)


def test_an_unknown_body_cannot_be_disabled() -> None:
    with pytest.raises(OptionError, match="int8_gemv; the bodies are int4_mma"):
        GpuKernels(EMULATION, KernelPolicy(disable_kernels="int8_gemv"))


def test_the_description_names_the_bodies() -> None:
    kernels = GpuKernels(EMULATION, KernelPolicy(disable_kernels="rms_norm,int4_mma"))
    described = kernels.describe()
    assert described.startswith("emulation: int4_gemv, int4_rows, fused_projections,")
    assert "head_norm_rope, attention_decode, rotated_attention, latent_attention, " in described


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="MLX computes on a GPU here")
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (KernelPolicy(kernels="metal"), "kernels='metal' cannot run"),
        (KernelPolicy(kernels="cuda"), "kernels='cuda' cannot run"),
        (KernelPolicy(disable_kernels="rms_norm"), "names bodies of a GPU, but none runs here"),
    ],
)
def test_a_cpu_refuses_what_only_a_gpu_can_do(policy: KernelPolicy, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        choose_kernels(policy)


@pytest.mark.parametrize(("phase", "count"), [(Phase.DECODE, 3), (Phase.DECODE, 9)])
def test_a_small_dense_weight_and_its_norm_are_one_launch(phase: Phase, count: int) -> None:
    launched: list[str] = []
    norm, weight, bias = Norm(rows(1, 96)[0], 1e-2), rows(5, 96, seed=2), rows(1, 5, seed=3)[0]
    project = GpuKernels(counting(launched), KernelPolicy()).normed_projections(
        norm, [weight], [bias]
    )
    assert project is not None
    x = rows(count, 96, seed=4)
    (found,) = project(x, phase)
    assert launched == (["experts_scores"] if count <= 8 else ["rms_norm"])
    wanted = mx.fast.rms_norm(x, norm.weight, norm.eps) @ weight.T + bias
    assert relative_error(found, np.array(wanted)) < 1e-5


def test_rows_of_a_table_are_normed_and_residuals_added_without_operations_between() -> None:
    launched: list[str] = []
    kernels, norm = GpuKernels(counting(launched), KernelPolicy()), Norm(None, 1e-2)
    table, tokens = quantized(7, 64, 4, 32)[0], mx.array([5, 0, 3], mx.int32)
    embed, plain = kernels.embedding(table, 0.5, norm), kernels.embedding(table, 0.5)
    added = kernels.projected_residual(quantized(64, 64, 4, 32)[0], None, norm)
    assert embed is not None
    assert plain is not None
    assert added is not None
    h = embed(tokens)
    wanted = mx.fast.rms_norm(plain(tokens), None, norm.eps)
    assert relative_error(h, np.array(wanted)) < 1e-5
    launched.clear()
    y = added(h, 3 * h, Phase.DECODE)
    assert launched == ["int4_gemv_1", "rms_norm"]
    nothing = added(h, mx.zeros(h.shape), Phase.DECODE)
    assert relative_error(y, np.array(nothing + 3 * h)) < 1e-5
    launched.clear()
    close = kernels.closing(norm, mx.array([-0.25]))
    assert close is not None
    closed = close(h, 3 * h)
    assert launched == ["rms_norm"]
    wanted = (3 * h + mx.fast.rms_norm(h, None, norm.eps)) * -0.25
    assert relative_error(closed, np.array(wanted)) < 1e-5

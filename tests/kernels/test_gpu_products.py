"""Which body serves a product, and what takes its place."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import EMULATION
from kernels.matrices import quantized, rows
from metal_emu import metal_kernel, require_emulator

from turbospark.kernels.gpu import dense_prefill
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.products import Products
from turbospark.kernels.gpu.target import BODIES
from turbospark.kernels.quantized_matmul import quantized_matmul_reference
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase

ALL = frozenset(BODIES)


def failing(refused: str, built: list[str], name: str = "metal") -> GpuTarget:
    """The emulation as a real GPU, on which kernels of that name cannot be built."""
    require_emulator()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        built.append(names["name"])
        if names["name"].startswith(refused):
            raise RuntimeError("pipeline refused")
        return metal_kernel(**names, strict=True)

    return GpuTarget(name, "metal.h", build)


@pytest.mark.parametrize("rows_of_x", [1, 4])
def test_a_refused_body_gives_way_with_one_line(
    rows_of_x: int, caplog: pytest.LogCaptureFixture
) -> None:
    built: list[str] = []
    products = Products(failing("int4_gemv", built), ALL)
    weight, values = quantized(37, 192, 4, 64)
    x = rows(rows_of_x, 192)
    with caplog.at_level(logging.WARNING, logger="turbospark"):
        product = products.single(weight, None)
        results = [product(x, Phase.DECODE) for _ in range(3)]
    wanted = np.array(x) @ values.T
    np.testing.assert_allclose(np.array(results[2]), wanted, rtol=1e-4, atol=1e-4)
    assert len(caplog.records) == 1
    assert "int4_gemv cannot run for 37 columns of 192 values" in caplog.text
    assert built == ["int4_gemv_1"]


def test_a_form_is_tried_when_it_is_bound(caplog: pytest.LogCaptureFixture) -> None:
    built: list[str] = []
    products = Products(failing("int4_gemv_pair", built), ALL)
    pair = [quantized(37, 192, 4, 64, seed=seed)[0] for seed in (1, 2)]
    fused = products.fused("fused_gate_up", pair, [None, None], activation="silu")
    assert built == ["int4_gemv_pair"]
    assert "pipeline refused" in caplog.text
    assert fused is not None
    assert fused(rows(1, 192), None, Phase.DECODE) is None


def test_weights_of_two_layouts_have_no_fused_form() -> None:
    products = Products(EMULATION, ALL)
    four, other = quantized(37, 192, 4, 64)[0], quantized(21, 192, 4, 32)[0]
    eight = quantized(37, 192, 8, 64)[0]
    for weights in ([four, other], [four, eight], [four] * 5, [four, rows(7, 192)]):
        assert products.fused("fused_projections", weights, [None] * len(weights)) is None
    assert products.fused("fused_projections", [four, four], [None, None]) is not None


def test_a_residual_of_another_dtype_is_left_to_mlx() -> None:
    products = Products(EMULATION, ALL)
    fused = products.fused("fused_residual", [quantized(37, 192, 4, 64)[0]], [None], residual=True)
    assert fused is not None
    x, added = rows(1, 192), rows(1, 37)
    assert fused(x, added, Phase.DECODE) is not None
    assert fused(x, added.astype(mx.float16), Phase.DECODE) is None


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_wide_prefill_multiplies_densely(
    zero: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dense_prefill.DENSE_ROWS, "emulation", 5)
    calls: list[int] = []

    def counted(x: mx.array, *rest: Any) -> mx.array:
        calls.append(x.shape[0])
        return quantized_matmul_reference(x, *rest)

    monkeypatch.setattr(dense_prefill, "quantized_matmul_reference", counted)
    weight, values = quantized(37, 192, 4, 64, zero=zero)
    bias = rows(1, 37, seed=5)[0]
    chosen = ALL if enabled else ALL - {"dense_prefill"}
    product = Products(replace(EMULATION), chosen).single(weight, bias)
    for count in (4, 5, 9):
        x = rows(count, 192)
        y = np.array(product(x, Phase.PREFILL))
        wanted = np.array(x) @ values.T + np.array(bias)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    assert calls == ([4] if enabled else [4, 5, 9])


def test_a_norm_too_wide_for_tensor_cores_is_launched_before_them() -> None:
    built: list[str] = []
    products = Products(replace(failing("", built, "recorded"), own="cuda"), ALL)
    w = quantized(16, 16384, 4, 64)[0]
    norm = Norm(None, 1e-6)
    fused = products.fused("fused_projections", [w], [None], norm=norm)
    assert fused is not None
    assert fused(rows(1, 16384).astype(mx.float16), None, Phase.DECODE) is None
    with pytest.raises(RuntimeError, match="refused"):
        products.single(w, None)(rows(1, 16384).astype(mx.float16), Phase.DECODE)
    assert built == ["int4_mma_1"]

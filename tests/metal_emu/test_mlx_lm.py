"""Kernels of mlx-lm, as they are, against its own fall-backs in plain operations."""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import mlx.core as mx
import pytest

from metal_emu import metal_kernel, require_emulator

pytest.importorskip("mlx_lm.models.base")

TOLERANCE = {mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(scope="module")
def emulated() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of mlx-lm anew, with its Metal kernels emulated."""
    require_emulator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", metal_kernel)
        yield lambda name: importlib.reload(importlib.import_module(f"mlx_lm.{name}"))


def assert_close(found: mx.array, wanted: mx.array, tolerance: float) -> None:
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    assert found.shape == wanted.shape
    error = (mx.abs(found - wanted).max() / (mx.abs(wanted).max() + 1e-9)).item()
    assert error < tolerance


def wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


@DTYPES
def test_gated_delta(emulated, dtype: mx.Dtype) -> None:
    module = emulated("models.gated_delta")
    B, T, Hk, Hv, Dk, Dv = 2, 3, 2, 4, 128, 16
    q, k = (mx.random.normal((B, T, Hk, Dk)).astype(dtype) * 0.1 for _ in range(2))
    v = mx.random.normal((B, T, Hv, Dv)).astype(dtype)
    decay = mx.random.uniform(0.5, 1, (B, T, Hv)).astype(dtype)
    beta = mx.random.uniform(0, 1, (B, T, Hv)).astype(dtype)
    state = mx.random.normal((B, Hv, Dv, Dk))
    found = module.gated_delta_kernel(q, k, v, decay, beta, state, None)
    wanted = module.gated_delta_ops(*map(wide, (q, k, v, decay, beta)), state, None)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, TOLERANCE[dtype])


@DTYPES
def test_state_space_step(emulated, dtype: mx.Dtype) -> None:
    module = emulated("models.ssm")
    n, h, d, groups, size = 2, 4, 16, 2, 64
    x = mx.random.normal((n, 1, h, d)).astype(dtype)
    a, bias = mx.random.normal((h,)), mx.random.normal((h,))
    skip = mx.random.normal((h,)).astype(dtype)
    b, c = (mx.random.normal((n, 1, groups, size)).astype(dtype) for _ in range(2))
    step = mx.random.normal((n, h, 1)).transpose(0, 2, 1).astype(dtype)
    state = mx.random.normal((n, h, d, size)).astype(dtype)
    found = module.ssm_update_kernel(x, a, b, c, skip, step, bias, state, (0.001, 100.0))
    wanted = module.ssm_attn(
        wide(x), a, wide(b), wide(c), wide(skip), wide(step), bias, wide(state), (0.001, 100.0)
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_residual_mix_with_threadgroup_memory(emulated, dtype: mx.Dtype) -> None:
    module = emulated("models.kimi_k3")
    N, D = 3, 1000
    raw = mx.random.normal((2, N, D)).astype(dtype)
    part = mx.random.normal((N, D)).astype(dtype)
    weight = (mx.random.normal((D,)) * 0.1).astype(dtype)
    inverse = mx.rsqrt((wide(raw) ** 2).mean(-1) + 1e-5)
    (found,) = module._attn_res_kernel(
        inputs=[raw, inverse, part, weight, mx.array([1e-5]), N],
        template=[("InT", dtype), ("K", 2), ("D", D), ("THREADS", 512)],
        grid=(512, N, 1),
        threadgroup=(512, 1, 1),
        output_shapes=[part.shape],
        output_dtypes=[dtype],
    )
    rows = mx.concatenate([wide(raw), wide(part)[None]])
    logits = (rows * wide(weight)).sum(-1) * mx.rsqrt((rows**2).mean(-1) + 1e-5)
    wanted = (mx.softmax(logits, axis=0)[..., None] * rows).sum(0)
    assert_close(found, wanted, TOLERANCE[dtype])

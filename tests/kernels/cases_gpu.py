"""Targets that the tests of GPU bodies run on: reference, emulation, and the real GPU if any."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import metal_emu
import mlx.core as mx
import pytest

from turbospark.kernels.gpu.kernel import CUDA, METAL, GpuTarget, strip_comments

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROUNDING = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}  # of one stored result

GAPPED = ("attention_partials", "attention_tensor", "head_norm_rope", "rotated_")
GAPPED += ("latent_queries", "latent_queries_dense", "latent_partials")
"""Bodies that leave out what nobody reads: chunks without keys, rows behind the newest."""


def emulated(order: int = 0, **names: Any) -> Callable[..., Sequence[mx.array]]:
    """A kernel in strict emulation; what a body may leave out holds NaN."""
    kernel = metal_emu.metal_kernel(**names, strict=True, order=order)
    gapped = names["name"].startswith(GAPPED)
    return functools.partial(kernel, init_value=float("nan")) if gapped else kernel


EMULATION = GpuTarget("emulation", "metal.h", emulated)
BACKWARDS = GpuTarget("backwards", "metal.h", functools.partial(emulated, 1))
TARGETS = [
    "reference",
    "emulation",
    pytest.param("metal", marks=pytest.mark.metal),
    pytest.param("cuda", marks=pytest.mark.cuda),
]


def poisoned(target: GpuTarget) -> GpuTarget:
    """The target, with outputs that hold NaN until a body writes them."""

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        return functools.partial(target.builder(**names), init_value=float("nan"))

    return replace(target, builder=build)


def tensor_emulation(order: int = 0) -> GpuTarget:
    """The emulation with bodies for tensor cores, whose instructions are made of shuffles."""
    metal_emu.require_emulator()
    helpers = strip_comments(Path(__file__).with_name("tensor_emulation.h").read_text("ascii"))
    dialect = resources.files("turbospark.kernels.gpu").joinpath("dialect/cuda_tensor.h")
    instructions = strip_comments(dialect.read_text("ascii"))

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        names["header"] = names["header"].replace(instructions, helpers)
        return emulated(order, **names)

    return GpuTarget("emulation", "metal.h", build, "cuda")


POISONED = {"metal": poisoned(METAL), "cuda": poisoned(CUDA)}


def resolve(name: str) -> GpuTarget | None:
    """A target by name, None for the reference; skips the test where it cannot run."""
    if name == "reference":
        return None
    if name == "emulation":
        metal_emu.require_emulator()
        return EMULATION
    if not (mx.metal if name == "metal" else mx.cuda).is_available():
        pytest.skip(f"MLX has no {name} back end here")
    return POISONED[name]


def mutated(kernel: str, old: str, new: str = "") -> GpuTarget:
    """The emulation of bodies, with `old` made `new` in the one of that name or its helpers."""
    metal_emu.require_emulator()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if names["name"] == kernel:
            text = "source" if old in names["source"] else "header"
            assert old in names[text], f"{kernel} has no {old!r} to mutate"
            names[text] = names[text].replace(old, new)
        return emulated(**names)

    return GpuTarget("mutant", "metal.h", build)

"""Runs Metal kernels on the CPU, with checks: see README.md."""

import os

import pytest

from metal_emu.compiler import why_unavailable
from metal_emu.errors import EmulationError, MetalCompileError, MetalRunError
from metal_emu.kernel import EmulatedKernel, metal_kernel
from metal_emu.signature import assemble

__all__ = [
    "EmulatedKernel",
    "EmulationError",
    "MetalCompileError",
    "MetalRunError",
    "assemble",
    "metal_kernel",
    "require_emulator",
]

REQUIRE = "TURBOSPARK_REQUIRE_EMULATOR"


def require_emulator() -> None:
    """Skip the running test where the emulator cannot run; fail it if the environment says so."""
    reason = why_unavailable()
    if reason is None:
        return
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but {reason}")
    pytest.skip(reason)

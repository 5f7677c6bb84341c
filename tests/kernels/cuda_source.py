"""The CUDA source that MLX makes of a body, and nvcc to compile it: neither needs a GPU."""

import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.nvrtc import kernel_source

REQUIRE = "TURBOSPARK_REQUIRE_CUDA_COMPILER"
WHEEL = "TURBOSPARK_MLX_CUDA_WHEEL"
ARCHITECTURE = "sm_90a"
LIBRARY = "mlx/lib/libmlx.so"
DEVICE = Path("mlx/backend/cuda/device")


def assemble(names: dict[str, Any], call: dict[str, Any]) -> str:
    """The source that `mx.fast.cuda_kernel` compiles for these arguments, under a short name."""
    return kernel_source(f"custom_kernel_{names['name']}", names, call)


def recording(sources: list[str]) -> GpuTarget:
    """A target that runs nothing: it notes the CUDA sources and answers zeros."""
    return noting(lambda names, call: sources.append(assemble(names, call)))


def noting(note: Callable[[dict[str, Any], dict[str, Any]], None]) -> GpuTarget:
    """A target that runs nothing: each launch's names and call are noted, and it answers zeros."""

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            note(names, call)
            pairs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return launch

    return GpuTarget("recording", "cuda.h", build, "cuda")


def compile_source(source: str, headers: Path) -> str:
    """Compile; return the assembler's report of registers and spills."""
    file = headers / "kernel.cu"
    file.write_text(source)
    flags = ["-std=c++17", f"-arch={ARCHITECTURE}", "-cubin", "-Xptxas", "-v", "-I", str(headers)]
    done = subprocess.run(
        ["nvcc", *flags, str(file), "-o", str(file.with_suffix(".cubin"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def write_headers(folder: Path) -> None:
    """Put MLX's headers for CUDA kernels into a folder, or skip (or fail) the test.

    MLX keeps their text inside its library, so they come from an MLX that has CUDA: the installed
    one, or the wheel mlx-cuda-13 that an environment variable names.
    """
    reason = None if shutil.which("nvcc") else "nvcc is not installed"
    library = b"" if reason else _library()
    texts = [_embedded(library, mark) for mark in (b"struct Limits", b"complex64_t = ")]
    if reason is None and None in texts:
        reason = f"MLX has no CUDA here; {WHEEL} may name a wheel of mlx-cuda-13"
    if reason is not None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    target = folder / DEVICE
    target.mkdir(parents=True)
    for name, text in zip(("utils.cuh", "complex.cuh"), texts, strict=True):
        (target / name).write_bytes(text or b"")
    installed = Path(mx.__file__).parent / "include" / DEVICE / "config.h"
    shutil.copy(installed, target / "config.h")


def _library() -> bytes:
    wheel = os.environ.get(WHEEL)
    if wheel:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(LIBRARY)
    return (Path(mx.__file__).parents[1] / LIBRARY).read_bytes()


def _embedded(library: bytes, mark: bytes) -> bytes | None:
    """The C string that holds `mark` and is a header of its own."""
    for found in re.finditer(re.escape(mark), library):
        start = library.rfind(b"\0", 0, found.start()) + 1
        text = library[start : library.find(b"\0", found.start())]
        if b"#pragma once" in text:
            return text
    return None

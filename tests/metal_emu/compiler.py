"""Compiles kernels with clang, cached by content outside the tree."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from metal_emu.errors import EmulationError, MetalCompileError
from metal_emu.lowering import SOURCE_NAME
from turbospark.settings import cache_folder

Mode = Literal["checked", "fast"]

HERE = Path(__file__).parent
INCLUDES = [HERE / "shim", HERE / "runtime", Path(mx.__file__).parent / "include"]
COMPILERS = ("clang++-19", "clang++-20", "clang++-21", "clang++-22")
LANGUAGE = [
    "-std=c++17",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern",
    *("-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    "-Wno-everything",
    "-Werror=vla",
]
FLOAT_LITERALS = ["-Xclang", "-cl-single-precision-constant"]  # in MSL the literal 1.0 is a float
MODES: dict[str, list[str]] = {
    "fast": ["-O2"],  # guard pages only
    "checked": [  # a hook at each memory access
        "-O1",
        "-gdwarf-4",
        "-gline-tables-only",
        "-fsanitize=thread",
        "-fsanitize=alignment,array-bounds,shift-exponent,integer-divide-by-zero",
        *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
        "-fsanitize-recover=all",
    ],
}


@dataclass(frozen=True)
class Library:
    """A compiled kernel, loaded."""

    handle: ctypes.CDLL
    path: Path


def why_unavailable() -> str | None:
    """Why the emulator cannot run here, or None when it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the Metal emulator runs on x86-64 Linux only"
    if _compiler() is None:
        return "the Metal emulator needs clang-19: apt-get install clang-19 libclang-rt-19-dev"
    return None


@functools.cache
def _compiler() -> str | None:
    return next((name for name in COMPILERS if shutil.which(name)), None)


def _folder() -> Path:
    folder = cache_folder() / "metal_emu"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _clang(arguments: list[str]) -> tuple[int, str]:
    compiler = _compiler()
    if compiler is None:
        raise EmulationError(str(why_unavailable()))
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def _must(arguments: list[str]) -> None:
    code, diagnostics = _clang(arguments)
    if code:
        raise EmulationError(diagnostics)


@functools.cache
def _shim_digest() -> str:
    folders = (HERE / "shim", HERE / "runtime")
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _key(*facts: object) -> str:
    text = repr((facts, _compiler(), mx.__version__, _shim_digest()))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator's runtime: fibers, memory, checks."""
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    path = _folder() / f"runtime-{_key()}.so"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared"]
        _must([*flags, *map(str, sources), "-o", str(unfinished)])
        unfinished.rename(path)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def compile_kernel(source: str, wrapper: str, mode: Mode, strict: bool) -> Library:
    """Check, compile and load a lowered kernel.

    Args:
        source: C++ text from `lowering.lower`.
        wrapper: text of the `emu_entry` function that calls the kernel.
        mode: checked or fast.
        strict: also refuse what CUDA would take otherwise.

    Raises:
        MetalCompileError: Metal's compiler would refuse the source.
        EmulationError: clang cannot compile it.
    """
    runtime()
    path = _folder() / f"{_key(source, wrapper, mode, strict, LANGUAGE, MODES[mode])}.so"
    if not path.exists():
        text = path.with_suffix(f".{os.getpid()}.cpp")  # two processes may be at it
        text.write_text(f'{source}\n#line 1 "wrapper"\n#ifndef EMU_CHECK\n{wrapper}\n#endif\n')
        try:
            _check(text, strict)
            _build(text, mode, path)
        finally:
            text.unlink()
    return Library(ctypes.CDLL(str(path)), path)


def _include_flags() -> list[str]:
    return [flag for folder in INCLUDES for flag in ("-I", str(folder))]


def _build(text: Path, mode: Mode, target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    flags = [*LANGUAGE, *FLOAT_LITERALS, *MODES[mode], *_include_flags()]
    # compiler-rt has the conversions to bfloat that older libgcc lacks. The sanitizers' runtimes
    # stay out: ours defines their hooks.
    link = ["-shared", "-lm", "--rtlib=compiler-rt", "-fno-sanitize-link-runtime"]
    _must([*flags, *link, str(text), "-o", str(unfinished)])
    unfinished.rename(target)


def _check(text: Path, strict: bool) -> None:
    """Read the source with real address spaces; raise on what Metal would refuse."""
    flags = LANGUAGE if strict else [*LANGUAGE, *FLOAT_LITERALS]
    flags = [*flags, "-Wimplicit-float-conversion", "-Wdouble-promotion", "-ferror-limit=0"]
    _, diagnostics = _clang([*flags, *_include_flags(), "-DEMU_CHECK", "-fsyntax-only", str(text)])
    refused = _refusals(diagnostics, strict)
    if refused:
        raise MetalCompileError("Metal would not compile this:\n" + "\n".join(refused[:10]))


def _refusals(diagnostics: str, strict: bool) -> list[str]:
    """Diagnostics of the kernel's own text that Metal (strict: or CUDA) would give as well."""
    found: list[str] = []
    starts = r"^(?=\S+:\d+:\d+: (?:error|warning):)"
    for diagnostic in re.split(starts, diagnostics, flags=re.MULTILINE):
        first = diagnostic.split("\n", 1)[0]
        if not re.search(rf"{re.escape(SOURCE_NAME)}:\d+", first):
            continue
        if "error:" in first:
            if not _copies_a_struct(diagnostic):
                found.append(first)
        elif re.search(r"loses floating-point precision.*to '.*(bfloat|__bf16)", first):
            found.append(first)
        elif strict and "increases floating-point precision" in first:
            literal = "'double'" in first
            reason = "an unsuffixed literal is a double" if literal else "cast before mixing types"
            found.append(f"{first} (CUDA: {reason})")
    return found


def _copies_a_struct(diagnostic: str) -> bool:
    """Metal copies structs across address spaces; C++ has no constructor for that."""
    pattern = r"the implicit copy (constructor|assignment operator)\) not viable: .*address space"
    return re.search(pattern, diagnostic) is not None

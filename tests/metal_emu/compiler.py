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
PRELUDE = HERE / "shim/prelude.h"
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
WARNINGS = ["-Wimplicit-float-conversion", "-Wdouble-promotion", "-ferror-limit=0"]
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


def _run(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def _clang(arguments: list[str]) -> list[str]:
    compiler = _compiler()
    if compiler is None:
        raise EmulationError(str(why_unavailable()))
    return [compiler, *arguments]


def _must(command: list[str]) -> None:
    code, diagnostics = _run(command)
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
        whole = [text for source in sources for text in ("-include", str(source))]
        _must(_clang([*flags, *whole, "-x", "c++", os.devnull, "-o", str(unfinished)]))
        unfinished.rename(path)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _prelude(*flags: str) -> list[str]:
    """Flags that put what precedes every kernel, read once, before a source of those flags."""
    flags = (*flags, *(flag for folder in INCLUDES for flag in ("-I", str(folder))))
    path = _folder() / f"prelude-{_key(flags)}.pch"
    # MLX's header has errors under the check's address spaces, which are nobody's here.
    lenient = ["-Xclang", "-fallow-pch-with-compiler-errors"]
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        timeless = ["-Xclang", "-fno-pch-timestamp"]  # its name is a hash of what went into it
        source = ["-x", "c++-header", str(PRELUDE), "-o", str(unfinished)]
        code, diagnostics = _run(_clang([*flags, *lenient, *timeless, *source]))
        if not unfinished.exists():
            raise EmulationError(diagnostics or f"clang ended with {code}")
        unfinished.rename(path)
    return [*flags, *lenient, "-include-pch", str(path)]


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


def _build(text: Path, mode: Mode, target: Path) -> None:
    unfinished, linked = (text.with_suffix(suffix) for suffix in (".o", ".so"))
    flags = _prelude(*LANGUAGE, *FLOAT_LITERALS, *MODES[mode])
    try:
        _must(_clang([*flags, "-c", str(text), "-o", str(unfinished)]))
        # The linker itself, as clang would link C++'s library with each kernel. The sanitizers'
        # runtimes stay out: ours defines their hooks.
        _must(["ld", "-shared", str(unfinished), _builtins(), "-lm", "-o", str(linked)])
    finally:
        unfinished.unlink(missing_ok=True)
    linked.rename(target)


@functools.cache
def _builtins() -> str:
    """compiler-rt, which has the conversions to bfloat that older libgcc lacks."""
    asked = _clang(["--rtlib=compiler-rt", "-print-libgcc-file-name"])
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def _check(text: Path, strict: bool) -> None:
    """Read the source with real address spaces; raise on what Metal would refuse."""
    literals = [] if strict else FLOAT_LITERALS
    flags = _prelude(*LANGUAGE, *literals, *WARNINGS, "-DEMU_CHECK")
    _, diagnostics = _run(_clang([*flags, "-fsyntax-only", str(text)]))
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
    """Metal copies structs across address spaces; C++ has no constructor for that.

    Where a template was told off for it before, a later use finds no candidate, and no reason.
    """
    own = r"the implicit copy (constructor|assignment operator)\) not viable: .*address space"
    later = r"candidate template ignored: substitution failure \[[^]]*\]$"
    return re.search(f"{own}|{later}", diagnostic, re.MULTILINE) is not None

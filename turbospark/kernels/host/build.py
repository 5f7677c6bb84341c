"""Compiling the host kernels at first use, and finding them again.

A library is named by a hash of all that went into it (sources, flags, compiler, CPU) and by the
hash of its own bytes, so a stale or damaged file is never loaded. Files appear under their final
name by one rename: processes that compile at the same time cannot disturb each other.
"""

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from turbospark.errors import KernelError
from turbospark.kernels.host.cpu import Isa, core_count, cpu_features, isa_flags
from turbospark.settings import KernelPolicy, cache_folder, compiler_override

NATIVE = Path(__file__).parent / "native"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-pthread",
    "-fno-tree-slp-vectorize",
)
_TIMEOUT_S = 300
_log = logging.getLogger("turbospark")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its command and what tells one version of it from another."""

    command: tuple[str, ...]
    identity: str

    @property
    def extra_flags(self) -> tuple[str, ...]:
        """Where `clang` is called without its C++ driver it must be told the standard library."""
        names = [Path(word).name for word in self.command]
        is_c_driver = any(
            name.startswith("clang") and not name.startswith("clang++") for name in names
        )
        return ("-lstdc++", "-lm") if is_c_driver else ()


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit: a source under `native/` and the macros it is compiled with."""

    source: str
    defines: tuple[str, ...] = ()


def find_compiler(policy: KernelPolicy) -> Compiler:
    """The compiler that the policy or `CXX` names, else c++, clang++ or g++.

    Raises:
        KernelError: none of them is on the path.
    """
    named = policy.cxx or compiler_override()
    for candidate in [named] if named else ["c++", "clang++", "g++"]:
        command = _split(candidate)
        found = [shutil.which(word) for word in command if not word.startswith("-")]
        if command and found[:1] and found[0] is not None:
            # A wrapper such as ccache stands before the compiler, flags stand behind it.
            programs = [Path(file).resolve() for file in found if file is not None]
            return Compiler((found[0], *command[1:]), " ".join(map(_identity, programs)))
    tried = named or "c++, clang++ and g++"
    raise KernelError(
        f"no C++ compiler for the host kernels: {tried} not found; install one or name it with "
        "cxx= or CXX"
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise KernelError(f"the C++ compiler {command!r} is no command: {error}") from None


def _identity(program: Path) -> str:
    facts = program.stat()
    return f"{program} {facts.st_size} {facts.st_mtime_ns}"


def load_library(name: str, units: Sequence[Unit], isa: Isa, compiler: Compiler) -> ctypes.CDLL:
    """Load a library of host kernels, compiling it if the cache does not hold it.

    Args:
        name: what it is, the start of its file name.
        units: translation units, compiled in parallel and linked together.
        isa: instruction set of all of them.
        compiler: used only when the cache has no such library.

    Raises:
        KernelError: it does not compile or load; the compiler's message is quoted.
    """
    stem = f"{name}-{isa}-{_key(units, isa, compiler)}"
    folder = _folder()
    for file in sorted(folder.glob(f"{stem}-*.so")):
        if _digest(file) == file.stem.rpartition("-")[2]:
            return _open(file)
        _log.warning("turbospark: the cached kernels %s are damaged; compiling them again", file)
        file.unlink(missing_ok=True)
    return _open(_compile(stem, units, isa, compiler, folder))


def _key(units: Sequence[Unit], isa: Isa, compiler: Compiler) -> str:
    parts = [sys.platform, *FLAGS, *isa_flags(isa), *compiler.command, compiler.identity]
    parts += sorted(cpu_features())
    parts += [f"{unit.source} {' '.join(unit.defines)}" for unit in units]
    return hashlib.sha256("\0".join([*parts, _sources_digest(units)]).encode()).hexdigest()[:16]


def _sources_digest(units: Sequence[Unit]) -> str:
    """A hash of the units' sources and of every header, as any of them may be included."""
    total = hashlib.sha256()
    own = {unit.source for unit in units}
    for file in sorted(NATIVE.iterdir()):
        if file.suffix == ".h" or file.name in own:
            total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _folder() -> Path:
    """The folder of compiled kernels; a private one where the cache cannot be written."""
    wanted = cache_folder() / "kernels"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted
        reason = "not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    return _private_folder(f"{wanted} cannot be used ({reason})")


@functools.cache
def _private_folder(why: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="turbospark-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log.warning("turbospark: %s; host kernels are compiled for this process only", why)
    return folder


@functools.cache
def _announce() -> None:
    _log.info("turbospark: compiling the kernels for this CPU; later starts find them compiled")


def _compile(stem: str, units: Sequence[Unit], isa: Isa, compiler: Compiler, folder: Path) -> Path:
    _announce()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as work:
        flags = [*FLAGS, *isa_flags(isa), f"-I{NATIVE}"]

        def compile_unit(numbered: tuple[int, Unit]) -> str:
            number, unit = numbered
            target = f"{work}/{number}.o"
            defines = [f"-D{define}" for define in unit.defines]
            source = str(NATIVE / unit.source)
            _call([*compiler.command, *flags, *defines, "-c", source, "-o", target])
            return target

        with ThreadPoolExecutor(core_count()) as pool:
            objects = list(pool.map(compile_unit, enumerate(units)))
        linked = Path(work) / "linked.so"
        link = [*compiler.command, "-shared", "-pthread", *objects, "-o", str(linked)]
        _call([*link, *compiler.extra_flags])
        final = folder / f"{stem}-{_digest(linked)}.so"
        linked.replace(final)
    return final


def _call(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"the C++ compiler {command[0]} did not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        told = [line for line in lines if "error" in line] or lines or ["no message"]
        raise KernelError(
            f"the C++ compiler {command[0]} failed with status {done.returncode}: {told[0]}"
        )


def _open(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise KernelError(f"the compiled kernels {file} do not load: {error}") from error

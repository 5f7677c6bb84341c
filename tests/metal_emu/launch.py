"""Runs a compiled kernel over a grid and turns what the runtime noticed into errors."""

import ctypes
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metal_emu.compiler import Library, runtime
from metal_emu.errors import MetalRunError
from metal_emu.lowering import SOURCE_NAME

MAX_THREADS = 1024  # of one threadgroup
THREADGROUP_BYTES = 32 << 10  # of its variables, on Metal

Triple = Sequence[int]


@dataclass(frozen=True)
class Buffer:
    """A buffer of a launch: an input, or an output with or without an initial value.

    `data` is a flat uint8 array; an output's is overwritten.
    """

    name: str
    data: np.ndarray[Any, Any]
    is_output: bool = False
    has_initial: bool = False


class BufferArgument(ctypes.Structure):
    """`emu::BufferArgument` of the runtime."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("is_output", ctypes.c_int),
        ("has_initial", ctypes.c_int),
        ("name", ctypes.c_char_p),
    )


class Report(ctypes.Structure):
    """`emu::Report` of the runtime: what a launch noticed besides a fault."""

    _fields_ = (
        ("unwritten", ctypes.c_uint64),
        ("conflicts", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("conflict", ctypes.c_char * 256),
        ("conflict_pc", ctypes.c_void_p),
        ("unwritten_name", ctypes.c_char * 64),
        ("unwritten_at", ctypes.c_uint64),
    )


def launch(
    library: Library,
    buffers: Sequence[Buffer],
    grid: Triple,
    threadgroup: Triple,
    *,
    checked: bool,
    strict: bool,
    order: int,
    threadgroup_bytes: int = THREADGROUP_BYTES,
) -> Report:
    """Run a kernel.

    Args:
        library: the compiled kernel.
        buffers: in the order of its parameters.
        grid: threads in each dimension.
        threadgroup: threads of one group in each dimension.
        checked: whether the kernel was compiled in checked mode.
        strict: refuse what behaves otherwise on CUDA.
        order: how threads take turns: 0 forwards, 1 backwards, else the seed of a shuffle.
        threadgroup_bytes: that the variables of a threadgroup may take.

    Raises:
        MetalRunError: the launch or the running kernel did something wrong.
    """
    _check_sizes(grid, threadgroup, strict)
    arguments = (BufferArgument * len(buffers))(
        *(
            BufferArgument(b.data.ctypes.data, b.data.nbytes, b.is_output, b.has_initial, name)
            for b, name in ((b, b.name.encode()) for b in buffers)
        )
    )
    message, counter, report = ctypes.create_string_buffer(1024), ctypes.c_void_p(), Report()
    triple = ctypes.c_uint32 * 3
    runtime().emu_limit_threadgroup(ctypes.c_size_t(threadgroup_bytes))
    faulted = runtime().emu_run(
        ctypes.cast(library.handle.emu_entry, ctypes.c_void_p),
        len(buffers),
        arguments,
        triple(*grid),
        triple(*threadgroup),
        order,
        int(checked),
        int(strict),
        message,
        ctypes.byref(counter),
        ctypes.byref(report),
    )
    if faulted:
        raise MetalRunError(message.value.decode() + _source_line(library, counter.value))
    if report.unwritten:
        raise MetalRunError(
            f"{report.unwritten} bytes of the outputs were never written, first "
            f"'{report.unwritten_name.decode()}' at byte {report.unwritten_at}"
        )
    if strict and report.conflicts:
        where = _source_line(library, report.conflict_pc)
        raise MetalRunError(
            f"{report.conflicts} conflicting accesses, first: {report.conflict.decode()}{where}"
        )
    return report


def _check_sizes(grid: Triple, threadgroup: Triple, strict: bool) -> None:
    if min(*grid, *threadgroup) < 1:
        raise MetalRunError(
            f"grid {tuple(grid)} or threadgroup {tuple(threadgroup)} has no threads"
        )
    clamped = [min(g, t) for g, t in zip(grid, threadgroup, strict=True)]
    if math.prod(clamped) > MAX_THREADS:
        raise MetalRunError(f"threadgroup {tuple(threadgroup)} has more than {MAX_THREADS} threads")
    if strict and any(g % t for g, t in zip(grid, threadgroup, strict=True)):
        raise MetalRunError(
            f"grid {tuple(grid)} is not a multiple of threadgroup {tuple(threadgroup)}: CUDA "
            "would run extra threads"
        )


def _source_line(library: Library, counter: int | None) -> str:
    """ " at kernel.metal:7" for a program counter of a checked build."""
    for line in Path("/proc/self/maps").read_text().splitlines() if counter else ():
        if str(library.path) not in line:
            continue
        base = int(line.split("-")[0], 16)
        found = subprocess.run(
            ["addr2line", "-i", "-e", str(library.path), hex(counter - base - 1)],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [text.split("/")[-1] for text in found.stdout.split() if SOURCE_NAME in text]
        return " at " + " < ".join(lines) if lines else ""
    return ""

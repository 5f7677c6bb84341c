"""What this CPU can do, and the compiler flags that ask for it."""

import functools
import os
import platform
from pathlib import Path
from typing import Literal

from turbospark.errors import KernelError

Isa = Literal["avx512", "avx2", "neon", "generic"]

_NEEDS: dict[Isa, frozenset[str]] = {
    "avx512": frozenset(
        ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_vnni"]
    ),
    "avx2": frozenset(["avx2", "fma", "f16c", "bmi2"]),
    "neon": frozenset(["asimd"]),
    "generic": frozenset(),
}
_FLAGS: dict[Isa, tuple[str, ...]] = {
    "avx512": (
        "-DTS_AVX512",
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mavx512vnni"),
        *("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    ),
    "avx2": ("-DTS_AVX2", "-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "neon": ("-DTS_NEON",),
    "generic": (),
}


@functools.cache
def cpu_features() -> frozenset[str]:
    """Names of instruction set extensions, as Linux spells them."""
    machine = platform.machine().lower()
    features: set[str] = {machine}
    if machine in {"arm64", "aarch64"}:
        features.add("asimd")  # part of every 64-bit Arm CPU
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in {"flags", "Features"}:
                    features.update(value.split())
                    break
    except OSError:
        pass
    return frozenset(features)


def available_isas() -> list[Isa]:
    """Instruction sets this CPU has, best first; "generic" is always last."""
    return [isa for isa, needs in _NEEDS.items() if needs <= cpu_features()]


def choose_isa(wanted: str) -> Isa:
    """The instruction set for `KernelPolicy.isa`.

    Raises:
        KernelError: this CPU lacks the one that was asked for.
    """
    found = available_isas()
    if wanted == "auto":
        return found[0]
    for isa in found:
        if isa == wanted:
            return isa
    raise KernelError(
        f"isa={wanted!r} is not an instruction set of this CPU; it has {', '.join(found)}"
    )


def isa_flags(isa: Isa) -> tuple[str, ...]:
    """Compiler flags that select an instruction set."""
    return _FLAGS[isa]


def core_count() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

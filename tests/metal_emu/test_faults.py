"""Each planted fault is found, and named."""

import re
from typing import Any

import mlx.core as mx
import pytest

from metal_emu import EmulationError, metal_kernel, require_emulator

N = 64
INDEX = "uint i = thread_position_in_threadgroup.x; "
SHARED = "threadgroup float t[64]; " + INDEX
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

RUN_FAULTS = {
    "read past the end": (
        INDEX + "y[i] = x[i + 1];",
        r"read of 4 bytes out of bounds of buffer 'x': byte offset 256, size 256"
        r".*at kernel\.metal:\d+",
    ),
    "read before the start": (
        "int i = thread_position_in_grid.x; y[i] = x[i - 1];",
        r"out of bounds of buffer 'x': byte offset -4",
    ),
    "write past the end": (
        INDEX + "y[i + 1] = x[i];",
        r"write of 4 bytes out of bounds of buffer 'y'",
    ),
    "output not written": (
        INDEX + "if (i != 7) y[i] = x[i];",
        r"4 bytes of the outputs were never written, first 'y' at byte 28",
    ),
    "output read before its write": (
        INDEX + "y[i] = y[i] + x[i];",
        r"read of output 'y' at byte 0 before it was written",
    ),
    "write to an input by a cast": (
        INDEX + "*(device float*)(x + i) = 0.0f; y[i] = x[i];",
        r"write to input buffer 'x'",
    ),
    "return before a barrier": (
        INDEX + f"if (i >= 40) return; {BARRIER} y[i] = x[i];",
        r"barrier divergence.*has returned",
    ),
    "two barriers for one": (
        INDEX + f"\nif (i < 32)\n {BARRIER}\nelse\n {BARRIER}\ny[i] = x[i];",
        r"barrier divergence: thread \d+ waits at line \d+ but",
    ),
    "half of the lanes in a collective": (
        INDEX + f"float v = x[i];\nif (i % 2)\n v = simd_sum(v);\n{BARRIER} y[i] = v;",
        r"divergent SIMD-group",
    ),
    "missing barrier after a write": (
        SHARED + "t[i] = x[i]; y[i] = t[i ^ 33];",
        r"race on threadgroup memory 't'|uninitialised threadgroup memory 't'",
    ),
    "missing barrier before a write": (
        SHARED + f"t[i] = x[i]; {BARRIER} float v = t[i ^ 33]; t[i] = v; y[i] = v;",
        r"race on threadgroup memory 't' at byte \d+",
    ),
    "simdgroup barrier between simdgroups": (
        SHARED + "t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); "
        "y[i] = i >= 32 ? t[i - 32] : 0.0f;",
        r"race on threadgroup memory",
    ),
    "uninitialised threadgroup memory": (
        SHARED + f"if (i) t[i] = x[i]; {BARRIER} y[i] = t[i];",
        r"uninitialised threadgroup memory 't' at byte 0",
    ),
    "outside a threadgroup array": (
        "threadgroup float t[32]; "
        + INDEX
        + f"threadgroup float* p = t; p[i] = x[i]; {BARRIER} y[i] = p[i];",
        r"outside threadgroup memory \(near 't'",
    ),
    "outside a private array": (
        INDEX + "float v[4] = {0}; v[i % 5] = x[i]; y[i] = v[0];",
        r"index 4 out of bounds of an array at kernel\.metal:\d+",
    ),
    "too much threadgroup memory": (
        "threadgroup float t[8193]; " + INDEX + "t[i] = x[i]; y[i] = t[i];",
        r"threadgroup memory is 32772 bytes",
    ),
    "shift by the width": (INDEX + "y[i] = x[i] + (1u << (i + 1));", r"shift by 32"),
    "division by zero": (INDEX + "y[i] = x[i] + 5 / int(i);", r"division by zero"),
    "misaligned vector load": (
        INDEX + "\nfloat4 v = *(const device float4*)(x + i % 16); y[i] = v.x + v.w;",
        r"misaligned address \(4 modulo 16\) at kernel\.metal:\d+",
    ),
}

COMPILE_FAULTS = {
    "pointer without an address space": (
        INDEX + "const float* p = x; y[i] = p[i];",
        r"cannot initialize a variable of type 'const float \*'",
    ),
    "pointer of another address space": (
        SHARED + "device float* p = t; p[i] = x[i]; y[i] = p[i];",
        r"cannot initialize",
    ),
    "write to an input": (INDEX + "x[i] = 0.0f; y[i] = x[i];", r"read-only"),
    "double": (INDEX + "double d = x[i]; y[i] = d;", r"double"),
    "variable length array": (
        INDEX + "int n = int(x[0]) + 4; float v[n]; v[0] = 1; y[i] = v[0];",
        r"variable length array",
    ),
    "std::": (INDEX + "y[i] = std::max(x[i], 0.0f);", r"std"),
}


def run(body: str, *, dtype: mx.Dtype = mx.float32, **kernel: Any) -> mx.array:
    (y,) = metal_kernel("planted", ["x"], ["y"], body, **kernel)(
        inputs=[mx.arange(N).astype(dtype)],
        grid=(N, 1, 1),
        threadgroup=(N, 1, 1),
        output_shapes=[(N,)],
        output_dtypes=[dtype],
    )
    return y


@pytest.fixture(autouse=True)
def _emulator() -> None:
    require_emulator()


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_a_fault_while_running_is_found(fault: str) -> None:
    body, message = RUN_FAULTS[fault]
    with pytest.raises(EmulationError) as raised:
        run(body)
    assert re.search(message, str(raised.value), re.DOTALL), str(raised.value)


@pytest.mark.parametrize("fault", COMPILE_FAULTS)
def test_what_metals_compiler_refuses_is_refused(fault: str) -> None:
    body, message = COMPILE_FAULTS[fault]
    with pytest.raises(EmulationError, match="Metal would not compile") as raised:
        run(body)
    assert re.search(message, str(raised.value)), str(raised.value)


def test_guard_pages_find_a_read_past_the_end_in_fast_mode() -> None:
    with pytest.raises(EmulationError, match="guard page"):
        run(RUN_FAULTS["read past the end"][0], mode="fast")


def test_float_to_bfloat_needs_a_cast() -> None:
    with pytest.raises(EmulationError, match="loses floating-point precision"):
        run(INDEX + "y[i] = float(x[i]) * 2.0f;", dtype=mx.bfloat16)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (INDEX + "y[i] = static_cast<half>(static_cast<float>(x[i]) * 2.0);", "is a double"),
        (INDEX + "y[i] = static_cast<half>(x[i] * 2.0f);", "cast before mixing"),
    ],
)
def test_strict_refuses_types_that_cuda_takes_otherwise(body: str, message: str) -> None:
    run(body, dtype=mx.float16)
    with pytest.raises(EmulationError, match=message):
        run(body, dtype=mx.float16, strict=True)


def test_strict_wants_all_lanes_in_a_collective() -> None:
    body = INDEX + "float v = x[i]; if (i < 4) v = simd_sum(v); y[i] = v;"
    assert run(body)[:5].tolist() == [6.0, 6.0, 6.0, 6.0, 4.0]  # Metal sums the active lanes
    with pytest.raises(EmulationError, match="undefined on CUDA"):
        run(body, strict=True)


def test_strict_refuses_two_writers_of_one_element() -> None:
    body = INDEX + "y[i / 2 * 2] = x[i / 2 * 2]; y[i / 2 * 2 + 1] = x[i];"
    run(body)
    with pytest.raises(EmulationError, match=r"conflicting accesses.*at kernel\.metal"):
        run(body, strict=True)


def test_strict_refuses_a_partial_threadgroup() -> None:
    kernel = metal_kernel("partial", ["x"], ["y"], INDEX + "y[i] = x[i];", strict=True)
    with pytest.raises(EmulationError, match="not a multiple"):
        kernel(
            inputs=[mx.ones(N)],
            grid=(N, 1, 1),
            threadgroup=(48, 1, 1),
            output_shapes=[(N,)],
            output_dtypes=[mx.float32],
        )


def test_order_of_simdgroups_shows_what_a_missing_barrier_does() -> None:
    """A maximum is read and its slot used again before the other simdgroup has read it."""
    first = "if (i % 32 == 0) "
    body = SHARED + f"{first} t[i / 32] = x[i]; {BARRIER} float v = t[0] + t[1]; "
    body += f"simdgroup_barrier(mem_flags::mem_threadgroup); {first} t[i / 32] = -1.0f; y[i] = v;"
    forwards, backwards = (run(body, mode="fast", order=order) for order in (0, 1))
    assert not mx.array_equal(forwards, backwards)
    with pytest.raises(EmulationError, match="race on threadgroup memory"):
        run(body)

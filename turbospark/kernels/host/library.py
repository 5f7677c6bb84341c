"""The compiled host kernels of one process and policy, and how arrays are handed to them."""

import ctypes
import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import numpy as np

from turbospark.errors import ShapeError
from turbospark.kernels.host.build import NATIVE, Compiler, Unit, find_compiler, load_library
from turbospark.kernels.host.cpu import Isa, choose_isa, core_count
from turbospark.settings import KernelPolicy

ActivationMode = Literal["exact", "pair", "int8"]
MODES: tuple[ActivationMode, ...] = ("exact", "pair", "int8")
"""In the order of `ts::Mode`."""


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """What every host binder needs.

    Attributes:
        library: the functions that serve every model, exported by `native/*.cpp` except the
            matrix products, which are libraries of their own.
        isa: instruction set that everything is compiled for.
        threads: how many take part in a region; the first argument of `ts::cooperate`.
        activations: how quantized products take their activations.
        compiler: compiles the products that a model turns out to need.
    """

    library: ctypes.CDLL
    isa: Isa
    threads: int
    activations: ActivationMode
    compiler: Compiler


def open_host(policy: KernelPolicy) -> Host:
    """Compile or find the host kernels for a policy.

    Raises:
        KernelError: no compiler, one that fails, or an instruction set this CPU lacks.
    """
    isa = choose_isa(policy.isa)
    compiler = find_compiler(policy)
    names = sorted(file.name for file in NATIVE.glob("*.cpp"))
    units = [Unit(name) for name in names if not name.startswith("matmul_")]
    library = load_library("host", units, isa, compiler)
    mode = policy.activations
    if mode == "auto":
        mode = "pair" if isa == "avx512" else "exact"
    return Host(library, isa, policy.threads or core_count(), mode, compiler)


class Place(NamedTuple):
    """Memory of one call's results: `parts` [rows, ...] and the address of the first."""

    rows: int
    parts: list[np.ndarray]
    address: int


def readable(x: mx.array) -> tuple[mx.array, int]:
    """An array as C++ reads it: float32, row-contiguous, evaluated, and its address.

    The address is good as long as the returned array lives.
    """
    if x.dtype != mx.float32:
        x = x.astype(mx.float32)
    try:
        return x, address(x)
    except TypeError:  # a transposed or sliced view
        x = mx.contiguous(x)
        return x, address(x)


def address(x: mx.array | np.ndarray) -> int:
    """The address of an array's first element.

    Raises:
        TypeError: the array is not row-contiguous.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, x)))


def result(values: np.ndarray) -> mx.array:
    """An MLX array with a copy of what C++ has written."""
    return mx.from_dlpack(values)


class Outputs:
    """Where C++ writes a call's results: those of one row in the same memory call after call.

    Every call takes a place of its own, so that calls of several threads do not meet in one.

    Args:
        shapes: of one row of each result.
    """

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self._shapes = shapes
        self._free: list[Place] = []

    def take(self, rows: int) -> Place:
        """A place for results [rows, *shape], one behind the other."""
        if rows == 1:
            try:
                return self._free.pop()
            except IndexError:
                pass
        sizes = [rows * math.prod(shape) for shape in self._shapes]
        memory = np.empty(sum(sizes), np.float32)
        parts = np.split(memory, list(itertools.accumulate(sizes[:-1])))
        shaped = zip(parts, self._shapes, strict=True)
        return Place(rows, [part.reshape(rows, *shape) for part, shape in shaped], address(memory))

    def finish(self, place: Place) -> tuple[mx.array, ...]:
        """What C++ has written there, as MLX arrays; the place is given back."""
        found = tuple(map(result, place.parts))
        if place.rows == 1:
            self._free.append(place)
        return found


def check_columns(x: mx.array, columns: int, what: str) -> None:
    """Refuse an input that is not [T, columns].

    Raises:
        ShapeError: it is not.
    """
    if x.ndim != 2 or x.shape[1] != columns:
        raise ShapeError(f"{what} takes [T, {columns}], not {x.shape}")

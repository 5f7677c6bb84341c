"""Matrices as the host kernels take them, and the products that each width needs."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mlx.core as mx

from turbospark.kernels.host.build import Unit, load_library
from turbospark.kernels.host.cpu import core_count
from turbospark.kernels.host.library import MODES, Host, address
from turbospark.kernels.weights import BITS, GROUP_SIZES, Norm, QuantizedWeight, Weight

_ELEMENTS = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
_HALF_POWER, _FP4_ZERO = 3, 12  # of MXFP4: `ts::HALF_POWER` and `ts::FP4_ZERO`


class NativeMatrix(ctypes.Structure):
    """`ts::Matrix`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("element", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("product", ctypes.c_void_p),
    )


class NativeNorm(ctypes.Structure):
    """`ts::Norm`."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class Products:
    """The libraries of matrix products that have been asked for, compiled in the background.

    A model asks for all of its widths while it is bound and needs the first at its first step, so
    they compile side by side.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._threads = ThreadPoolExecutor(core_count(), thread_name_prefix="turbospark-compile")
        self._wanted: dict[str, Future[int]] = {}

    def request(self, weight: Weight) -> Future[int]:
        """The address of the `ts::Product` for a weight, once its library is there."""
        if isinstance(weight, QuantizedWeight):
            mode = self._host.activations
            if mode == "int8" and self._host.isa != "avx512":
                mode = "pair"  # without 8-bit dot products both forms are 16 bits wide
            name = f"matmul-b{weight.bits}g{weight.group_size}-{mode}"
            defines = [
                f"TS_BITS={weight.bits}",
                f"TS_GROUP={weight.group_size}",
                f"TS_MODE={MODES.index(mode)}",
            ]
            if weight.mode == "mxfp4":
                name = f"matmul-mxfp4-{mode}"
                defines.append("TS_FP4")
            unit = Unit("matmul_quantized.cpp", tuple(defines))
        else:
            name, unit = "matmul-dense", Unit("matmul_dense.cpp")
        if name not in self._wanted:
            self._wanted[name] = self._threads.submit(self._load, name, unit)
        return self._wanted[name]

    def _load(self, name: str, unit: Unit) -> int:
        library = load_library(name, [unit], self._host.isa, self._host.compiler)
        entry = library.ts_product
        entry.restype = ctypes.c_void_p
        return entry()


class HostMatrices:
    """The native form of a unit's weights; keeps every array alive that C++ points to."""

    def __init__(
        self,
        host: Host,
        products: Products,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
    ) -> None:
        self._use_huge_pages = host.library.ts_use_huge_pages
        self._use_huge_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._kept: list[Any] = []
        self._sizes: dict[int, int] = {}
        pairs = list(zip(weights, biases, strict=True))
        self.native = (NativeMatrix * len(pairs))()
        for index, (weight, bias) in enumerate(pairs):
            self._fill(self.native[index], weight, bias)
        self.rows = [weight.shape[-2] for weight in weights]
        self.columns = weights[0].shape[-1]
        self._pending: list[Future[int]] = [products.request(weight) for weight in weights]

    def settle(self) -> None:
        """Wait for the products.

        Raises:
            KernelError: one of them does not compile.
        """
        for index, future in enumerate(self._pending):
            self.native[index].product = future.result()
        self._pending = []

    def at(self, index: int) -> int:
        """The address of one `ts::Matrix`."""
        return ctypes.addressof(self.native) + index * ctypes.sizeof(NativeMatrix)

    def _fill(self, native: NativeMatrix, weight: Weight, bias: mx.array | None) -> None:
        native.rows, native.columns = weight.shape[-2:]
        if bias is not None:
            native.added = self._keep(bias.astype(mx.float32))
        if not isinstance(weight, QuantizedWeight):
            native.element = _ELEMENTS[weight.dtype]
            native.data = self._keep(weight)
            return
        if weight.mode == "mxfp4":
            native.element, native.zero = _HALF_POWER, _FP4_ZERO
            native.data, native.scales = self._keep(weight.codes), self._keep(weight.scales)
            return
        scales, offsets = weight.scales, weight.biases
        if offsets is not None and offsets.dtype != scales.dtype:
            scales, offsets = scales.astype(mx.float32), offsets.astype(mx.float32)
        native.element = _ELEMENTS[scales.dtype]
        native.zero = weight.zero or 0
        native.data, native.scales = self._keep(weight.codes), self._keep(scales)
        if offsets is not None:
            native.biases = self._keep(offsets)

    def _keep(self, array: mx.array) -> int:
        array = mx.contiguous(array)
        self._kept.append(array)
        start = address(array)
        self._sizes[start] = array.nbytes
        self._use_huge_pages(start, array.nbytes)
        return start


class HostStacks(HostMatrices):
    """The native form of stacked weights [E, N, K]: E matrices each, one stack behind the other."""

    def __init__(
        self,
        host: Host,
        products: Products,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
    ) -> None:
        super().__init__(host, products, weights, biases)
        self._count = weights[0].shape[0]
        firsts = self.native
        self.native = (NativeMatrix * (self._count * len(weights)))()
        for index, first in enumerate(firsts):
            for expert in range(self._count):
                self._copy(first, expert, self.native[index * self._count + expert])

    def settle(self) -> None:
        """Wait for the products.

        Raises:
            KernelError: one of them does not compile.
        """
        for index, future in enumerate(self._pending):
            for expert in range(self._count):
                self.native[index * self._count + expert].product = future.result()
        self._pending = []

    def at(self, index: int) -> int:
        """The address of a stack's first `ts::Matrix`."""
        return super().at(index * self._count)

    def _copy(self, first: NativeMatrix, expert: int, to: NativeMatrix) -> None:
        """Describe one matrix of the stack that `first` is the beginning of."""
        ctypes.memmove(ctypes.byref(to), ctypes.byref(first), ctypes.sizeof(NativeMatrix))
        for name in ("data", "scales", "biases", "added"):
            start: int | None = getattr(first, name)
            if start is not None:
                step = self._sizes[start] // self._count
                setattr(to, name, start + expert * step)


def is_supported(weight: Weight, dimensions: int = 2) -> bool:
    """Whether the host target has products for a weight of so many dimensions."""
    if len(weight.shape) != dimensions or 0 in weight.shape:
        return False
    if not isinstance(weight, QuantizedWeight):
        return weight.dtype in _ELEMENTS
    if weight.mode == "mxfp4":
        return True
    known = weight.bits in BITS and weight.group_size in GROUP_SIZES
    middle = weight.zero in {None, 0, 1 << (weight.bits - 1)}
    return known and middle and weight.scales.dtype in _ELEMENTS


class HostNorm:
    """The native form of a norm; `pointer` is None where there is none."""

    def __init__(self, norm: Norm | None) -> None:
        self.pointer: int | None = None
        if norm is None:
            return
        self._native = NativeNorm(None, norm.eps)
        if norm.weight is not None:
            self._weight = mx.contiguous(norm.weight.astype(mx.float32))
            self._native.weight = address(self._weight)
        self.pointer = ctypes.addressof(self._native)

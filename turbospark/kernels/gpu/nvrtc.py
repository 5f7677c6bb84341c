"""Kernels compiled for CUDA before MLX asks for them, and kept on disk.

MLX compiles a custom kernel anew in every process, behind headers that alone take two seconds a
kernel, but first looks into its folder of compiled modules. What is put there under the right name
is found: the name is that of the kernel and a hash of its source. Where anything here is not as
expected, MLX compiles by itself.
"""

import ctypes
import functools
import importlib.metadata
import logging
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from turbospark.settings import cuda_toolkit_override, mlx_modules_override

_log = logging.getLogger("turbospark")

CTYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint8: "uint8_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}
TYPE_NAMES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.uint8: "uint8_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}
"""What MLX makes of a dtype in a kernel's name."""

STUBS = {
    "mlx/backend/cuda/device/utils.cuh": """#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
namespace mlx::core::cu {
template <typename T>
struct Dims {
  T values[10];
  __device__ const T& operator[](int i) const { return values[i]; }
};
using Shape = Dims<int32_t>;
using Strides = Dims<int64_t>;
}
""",
    "cooperative_groups.h": "namespace cooperative_groups {}\n",
}
"""What the source includes, without what bodies do not use: a tenth of the time."""

_NAME_BYTES = 245  # of a file's name in MLX's folder
_WORD = struct.Struct("<Q")


class Compiler:
    """NVRTC, as MLX has loaded it, for one architecture.

    Args:
        library: NVRTC.
        architecture: sm_90a, say.
        includes: folders with CUDA's headers.
    """

    def __init__(self, library: ctypes.CDLL, architecture: str, includes: Sequence[Path]) -> None:
        self._library = library
        self._options = ["--device-as-default-execution-space"]
        self._options.append(f"--gpu-architecture={architecture}")
        self._options += [f"--include-path={folder}" for folder in includes]

    def compile(self, source: str, name: str) -> tuple[bytes, str]:
        """A module and the name that the function `name` has in it.

        Raises:
            RuntimeError: the source does not compile; the compiler's words.
        """
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(STUBS))(*(text.encode() for text in STUBS.values()))
        names = (ctypes.c_char_p * len(STUBS))(*(path.encode() for path in STUBS))
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu",
            len(STUBS), texts, names,
        )  # fmt: skip
        try:
            self._call("nvrtcAddNameExpression", program, name.encode())
            options = (ctypes.c_char_p * len(self._options))(
                *(option.encode() for option in self._options)
            )
            if self._library.nvrtcCompileProgram(program, len(self._options), options):
                raise RuntimeError(self._read(program, "ProgramLog").decode(errors="replace"))
            lowered = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
            return self._read(program, "CUBIN"), (lowered.value or b"").decode()
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} answers {status}")


def compile_ahead(names: Mapping[str, Any], call: Mapping[str, Any]) -> None:
    """Put a kernel's module where MLX looks for it, unless it is there.

    Args:
        names: arguments of `mx.fast.cuda_kernel`.
        call: arguments of the kernel that it gives.
    """
    compiler, folder = _compiler(), modules_folder()
    if compiler is None:
        return
    try:
        name = kernel_name(names, call)
        source = kernel_source(name, names, call)
        path = module_path(folder, f"{name}_{string_hash(source.encode()):x}")
        if path.exists():
            return
        symbol = f"mlx::core::cu::{name}"
        module, lowered = compiler.compile(source, symbol)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path.with_suffix(".txt"), f"{symbol}\t{lowered}\n".encode())
        _write(path, module)
    except (KeyError, OSError, RuntimeError) as error:
        _log.debug("turbospark: %s is left to MLX's compiler: %s", names["name"], error)


def kernel_name(names: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    """What MLX calls a kernel with these template values."""
    words = [
        TYPE_NAMES[value]
        if isinstance(value, mx.Dtype)
        else ("t" if value else "f")
        if isinstance(value, bool)
        else str(value)
        for _, value in call["template"]
    ]
    return "_".join([f"custom_kernel_{names['name']}", *words])


def kernel_source(name: str, names: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    """The source that MLX makes of a kernel, to the letter."""
    parameters: list[str] = []
    body = names["source"]
    for label, array in zip(names["input_names"], call["inputs"], strict=True):
        parameters.append(f"    const {CTYPES[array.dtype]}* {label}")
        facts = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
        parameters += [
            f"    const __grid_constant__ {kind} {label}_{fact}"
            for fact, kind in facts.items()
            if array.ndim and f"{label}_{fact}" in body
        ]
    for label, dtype in zip(names["output_names"], call["output_dtypes"], strict=True):
        parameters.append(f"    {CTYPES[dtype]}* {label}")
    constants = [
        f"  using {label} = {CTYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"  constexpr {'bool' if isinstance(value, bool) else 'int'} {label} = "
        f"{str(value).lower()};\n"
        for label, value in call["template"]
    ]
    return (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        + names["header"]
        + "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        + f"__global__ void {name}(\n"
        + ",\n".join(parameters)
        + ") {\n"
        + "".join([*constants, "\n"] if constants else [])
        + body
        + "\n}\n\n} // namespace mlx::core::cu\n"
    )


def string_hash(text: bytes) -> int:
    """`std::hash<std::string>` of GNU's library: Murmur's 64-bit hash."""
    mask, multiplier = (1 << 64) - 1, 0xC6A4A7935BD1E995

    def mixed(value: int) -> int:
        return value ^ (value >> 47)

    value = 0xC70F6907 ^ (len(text) * multiplier & mask)
    whole = len(text) & ~7
    for (word,) in _WORD.iter_unpack(text[:whole]):
        value = (value ^ (mixed(word * multiplier & mask) * multiplier & mask)) * multiplier & mask
    if whole < len(text):
        value = (value ^ int.from_bytes(text[whole:], "little")) * multiplier & mask
    return mixed(mixed(value) * multiplier & mask)


def modules_folder() -> Path:
    """Where MLX looks for compiled modules."""
    given = mlx_modules_override()
    if given:
        return Path(given)
    version = importlib.metadata.version("mlx")
    return Path(tempfile.gettempdir()) / "mlx" / version / "ptx"


def module_path(folder: Path, name: str) -> Path:
    """The file of a module: names too long for a file become folders."""
    while len(name) > _NAME_BYTES:
        folder, name = folder / name[:_NAME_BYTES], name[_NAME_BYTES:]
    return folder / f"{name}.ptx"


@functools.cache
def _compiler() -> Compiler | None:
    """The compiler for the GPU that MLX computes on, or None where that cannot be told."""
    info = mx.device_info()
    major, minor = (info.get(f"compute_capability_{part}") for part in ("major", "minor"))
    library = _library()
    if major is None or minor is None or library is None:
        return None
    suffix = "a" if int(major) >= 9 else ""
    includes = [folder for folder in _include_folders() if folder.exists()]
    return Compiler(library, f"sm_{major}{minor}{suffix}", includes)


def _library() -> ctypes.CDLL | None:
    for version in (13, 12):
        try:
            return ctypes.CDLL(f"libnvrtc.so.{version}")
        except OSError:
            continue
    return None


def _include_folders() -> list[Path]:
    root = Path(mx.__file__).parent
    toolkit = cuda_toolkit_override() or "/usr/local/cuda"
    own = [root.parent / "nvidia" / part / "include" for part in ("cu13", "cuda_runtime")]
    return [root / "include", root / "include" / "cccl", *own, Path(toolkit) / "include"]


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def caching(builder: Callable[..., Any]) -> Callable[..., Any]:
    """A builder of kernels whose modules are compiled ahead of MLX."""

    def build(**names: Any) -> Callable[..., Any]:
        kernel, known = builder(**names), set[tuple[object, ...]]()

        def launch(**call: Any) -> Any:
            ranks = [array.ndim for array in call["inputs"]]
            key = (*call["template"], *call["output_dtypes"], *ranks)
            if key not in known:
                compile_ahead(names, call)
                known.add(key)
            return kernel(**call)

        return launch

    return build

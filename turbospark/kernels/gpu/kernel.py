"""GPU kernels whose body is one Metal text, built for the target that runs it."""

import functools
import hashlib
import math
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import mlx.core as mx

from turbospark.errors import KernelError
from turbospark.kernels.device import on_cpu
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.nvrtc import caching
from turbospark.kernels.gpu.wiring import Wiring, facts_of

MAX_BINDINGS = 31
MAX_THREADS = 256  # of a threadgroup: a pipeline's own limit follows its registers
MAX_ELEMENTS = 2**31  # bodies index with 32 bits

Triple = tuple[int, int, int]
Builder = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """Where bodies run.

    Attributes:
        name: metal or cuda (tests have others).
        prelude: the file in dialect/ that spells the dialect there.
        builder: takes the arguments of `mx.fast.metal_kernel` and gives what launches.
        own: the folder in bodies/ of what only this target runs; empty if it has none.
        by_path: whether its compiler reads files, so that MLX gets their paths instead of their
            text, which it hashes at every call: 10 microseconds for the longest ones.
    """

    name: str
    prelude: str
    builder: Builder
    own: str = ""
    by_path: bool = False


METAL = GpuTarget("metal", "metal.h", mx.fast.metal_kernel)
CUDA = GpuTarget("cuda", "cuda.h", caching(mx.fast.cuda_kernel), "cuda", by_path=True)


def current_target() -> GpuTarget | None:
    """The GPU that MLX computes on, or None on a CPU."""
    if on_cpu():
        return None
    if mx.metal.is_available():
        return METAL
    return CUDA if mx.cuda.is_available() else None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A body with its names. It is built at the first launch on a target, never at import.

    Attributes:
        name: also that of the body's file, bodies/<name>.h.
        inputs: names of the arrays it reads, as in the body.
        outputs: names of the arrays it writes.
        only: the target of a body that no other one has, which lies in bodies/<only>/ and follows
            dialect/<only>_only.h, unless helpers are named.
        takes_strides: inputs may be views whose strides the body asks for, and are not copied.
        body: the file's name where it is not the kernel's.
        macros: "NAME VALUE" lines that precede the helpers, for bodies that serve several kernels.
        helpers: files in dialect/ that the body needs beside the common ones.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    only: str = ""
    takes_strides: bool = False
    body: str = ""
    macros: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The body's text without comments, and that of what it includes."""
        return _text(self.path)

    @property
    def path(self) -> str:
        """The body's file under kernels/gpu/."""
        folder = f"bodies/{self.only}" if self.only else "bodies"
        return f"{folder}/{self.body or self.name}.h"

    def source_for(self, target: GpuTarget, wiring: Wiring | None = None) -> str:
        """The body as MLX gets it: its text, or its path with the names that MLX looks for.

        Args:
            target: where.
            wiring: where it finds its inputs; by default each is an argument.
        """
        opening = "" if wiring is None else wiring.declarations(self.inputs)
        if not target.by_path:
            return opening + self.source
        facts = [fact for name in self.inputs for fact in facts_of(name) if fact in self.source]
        return f"{opening}{_part(self.path, target)}// {facts} {_digest()}\n"

    def header(self, target: GpuTarget) -> str:
        """What precedes the body on a target."""
        if not (self.macros or self.helpers):
            return header(target, self.only)
        macros = "".join(f"#define {macro}\n" for macro in self.macros)
        helpers = "".join(_part(f"dialect/{name}", target) for name in self.helpers)
        return header(target) + macros + helpers

    def __call__(
        self,
        target: GpuTarget,
        inputs: Sequence[mx.array],
        *,
        template: Mapping[str, mx.Dtype | int | bool],
        grid: Triple,
        threadgroup: Triple,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        shared_bytes: int = 0,
        bundle: Bundle | None = None,
    ) -> list[mx.array]:
        """Launch.

        Args:
            target: where.
            inputs: arrays of at least one dimension, in the order of `self.inputs`.
            template: sizes of the model and types; a new value compiles anew. MLX makes a name of
                them, so no number is below 0.
            grid: threads, whole threadgroups.
            threadgroup: threads of one group, whole SIMD-groups.
            outputs: shape and dtype of each output.
            shared_bytes: memory of a threadgroup that the body sizes itself; CUDA only. It follows
                from the template.
            bundle: inputs that are in there are read from there, and are no arguments.

        Raises:
            KernelError: the launch breaks a rule of the bodies.
        """
        self._check(inputs, template, grid, threadgroup)
        wiring = Wiring.of(inputs, bundle, _strided(self))
        launch = _build(self, target, shared_bytes, wiring)
        # On CUDA a built kernel is found by its name and template alone, so types belong there.
        types = {f"TYPE_{name}": x.dtype for name, x in zip(self.inputs, inputs, strict=True)}
        return list(
            launch(
                inputs=wiring.passed(inputs, bundle),
                template=[
                    *template.items(),
                    *types.items(),
                    *wiring.values(self.inputs, inputs, bundle).items(),
                ],
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=[shape for shape, _ in outputs],
                output_dtypes=[dtype for _, dtype in outputs],
            )
        )

    def _check(
        self,
        inputs: Sequence[mx.array],
        template: Mapping[str, mx.Dtype | int | bool],
        grid: Triple,
        threadgroup: Triple,
    ) -> None:
        threads = math.prod(threadgroup)
        broken = {
            "an input has no dimensions": any(array.ndim == 0 for array in inputs),
            f"an input has {MAX_ELEMENTS} elements or more": any(
                array.size >= MAX_ELEMENTS for array in inputs
            ),
            f"{len(inputs)} inputs for {len(self.inputs)} names": len(inputs) != len(self.inputs),
            "a template value is below 0": any(
                isinstance(value, int) and value < 0 for value in template.values()
            ),
            f"grid {grid} is no multiple of threadgroup {threadgroup}": any(
                g < 1 or g % t for g, t in zip(grid, threadgroup, strict=True)
            ),
            f"threadgroup {threadgroup} is not of whole SIMD-groups": threads % 32 != 0,
            f"threadgroup {threadgroup} exceeds {MAX_THREADS} threads": threads > MAX_THREADS,
        }
        for what, is_broken in broken.items():
            if is_broken:
                raise KernelError(f"kernel {self.name}: {what}")


@functools.cache
def bounded(kernel: Kernel, threads: int, blocks: int) -> Kernel:
    """A kernel that only CUDA has, with so few registers that blocks fit on a multiprocessor.

    MLX finds a built kernel by its name and template, so these have to tell apart what is bounded
    otherwise.

    Args:
        kernel: any.
        threads: of a block.
        blocks: that are to fit; 0 for any number.
    """
    if blocks == 0:
        return kernel
    macros = (*kernel.macros, f"RESIDENT {threads}, {blocks}")
    return replace(kernel, macros=macros, helpers=(*kernel.helpers, "cuda_resident.h"))


def header(target: GpuTarget, only: str = "") -> str:
    """What precedes a body on a target: its prelude, the common helpers, those it alone has."""
    names = [target.prelude, "common.h", *([f"{only}_only.h"] if only else [])]
    return "".join(_part(f"dialect/{name}", target) for name in names)


@functools.cache
def constant(value: float | tuple[float, ...]) -> mx.array:
    """Numbers as bodies take them: an array of float32, with zeros behind them on a GPU."""
    return resident(mx.array(value if isinstance(value, tuple) else [value], mx.float32))


def resident(values: mx.array) -> mx.array:
    """Numbers [n] in the GPU's own memory, with zeros behind them.

    What the host writes may stay in the host's memory, and every read of it crosses the bus.
    """
    if on_cpu():
        return values
    copy = mx.concatenate([values, mx.zeros((4,), values.dtype)])
    mx.eval(copy)  # pyright: ignore[reportUnknownMemberType]
    return copy


@functools.cache
def _text(path: str) -> str:
    """A file without comments, with those that it includes in their places."""
    text = resources.files("turbospark.kernels.gpu").joinpath(path).read_text("ascii")
    folder = posixpath.dirname(path)

    def included(line: re.Match[str]) -> str:
        return _text(posixpath.normpath(posixpath.join(folder, line[1])))

    return re.sub(r'#include "(.*)"\n', included, strip_comments(text))


def _part(path: str, target: GpuTarget) -> str:
    """A file as a part of what MLX gets."""
    if not target.by_path:
        return _text(path)
    return f'#include "{resources.files("turbospark.kernels.gpu").joinpath(path)}"\n'


@functools.cache
def _digest() -> str:
    """Tells one state of all files from another, where MLX gets their paths only."""
    root = resources.files("turbospark.kernels.gpu")
    folders = [root.joinpath(name) for name in ("dialect", "bodies", "bodies/cuda")]
    files = [file for folder in folders for file in folder.iterdir() if file.name.endswith(".h")]
    texts = sorted((file.name, file.read_bytes()) for file in files)
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def strip_comments(text: str) -> str:
    """A source without comments, blank lines and trailing blanks."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    lines = (line.rstrip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


@functools.cache
def _strided(kernel: Kernel) -> tuple[bool, ...]:
    """Of each input whether the body asks for its shape or strides."""
    source = kernel.source
    return tuple(any(fact in source for fact in facts_of(name)) for name in kernel.inputs)


@functools.cache
def _build(
    kernel: Kernel, target: GpuTarget, shared_bytes: int, wiring: Wiring
) -> Callable[..., Any]:
    shared = {"shared_memory": shared_bytes} if shared_bytes else {}
    return target.builder(
        name=kernel.name,
        input_names=wiring.names(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source_for(target, wiring),
        header=kernel.header(target),
        ensure_row_contiguous=not kernel.takes_strides,
        **shared,
    )

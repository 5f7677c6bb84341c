"""`metal_kernel` with the arguments of `mx.fast.metal_kernel`, run on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from metal_emu.compiler import Mode, compile_kernel
from metal_emu.launch import THREADGROUP_BYTES, Buffer, Report, Triple, launch
from metal_emu.lowering import lower
from metal_emu.signature import ATTRIBUTES, KernelText, Template, assemble


@dataclass
class EmulatedKernel:
    """A kernel body that is assembled, compiled and run at each call.

    Attributes:
        mode: "checked" looks at every memory access; "fast" has guard pages only.
        strict: also refuse what behaves otherwise on CUDA: partial threadgroups, SIMD functions
            with lanes absent, two threads writing one element, mixed types, unsuffixed literals.
        order: how threads take turns: 0 forwards, 1 backwards, else the seed of a shuffle.
        threadgroup_bytes: that the variables of a threadgroup may take.
        report: what the last launch noticed.
    """

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    atomic_outputs: bool = False
    mode: Mode = "checked"
    strict: bool = False
    order: int = 0
    threadgroup_bytes: int = THREADGROUP_BYTES
    report: Report = field(default_factory=Report)

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Triple,
        threadgroup: Triple,
        template: Template = (),
        init_value: float | None = None,
        **_: Any,
    ) -> list[mx.array]:
        """Run the kernel; the outputs are evaluated arrays.

        Raises:
            EmulationError: the source would not compile, or the kernel did something wrong.
        """
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        named = dict(zip(self.input_names, arrays, strict=True))
        text = assemble(
            self.name,
            named,
            dict(zip(self.output_names, output_dtypes, strict=True)),
            self.source,
            header=self.header,
            template=template,
            atomic_outputs=self.atomic_outputs,
        )
        library = compile_kernel(lower(text.source), _entry(text), self.mode, self.strict)
        buffers = _input_buffers(named)
        for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            buffers[name] = _output_buffer(name, shape, dtype, init_value)
        self.report = launch(
            library,
            [buffers[parameter.name] for parameter in text.parameters],
            grid,
            threadgroup,
            checked=self.mode == "checked",
            strict=self.strict,
            order=self.order,
            threadgroup_bytes=self.threadgroup_bytes,
        )
        return [
            _to_array(buffers[name].data, shape, dtype)
            for name, shape, dtype in zip(
                self.output_names, output_shapes, output_dtypes, strict=True
            )
        ]


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    *,
    compile_options: object = None,
    **emulation: Any,
) -> EmulatedKernel:
    """An emulated kernel; `emulation` takes `mode`, `strict`, `order` and `threadgroup_bytes`.

    Inputs are always passed row-contiguous, and `compile_options` change nothing.
    """
    del ensure_row_contiguous, compile_options
    return EmulatedKernel(
        name, input_names, output_names, source, header, atomic_outputs, **emulation
    )


def _entry(text: KernelText) -> str:
    """The function that the runtime calls for each thread."""
    values = [
        f"*({p.ctype}*)buffers[{i}]" if p.kind == "&" else f"({p.ctype}*)buffers[{i}]"
        for i, p in enumerate(text.parameters)
    ]
    for name in text.attributes:
        if ATTRIBUTES[name] == "uint":
            values.append(f"self->{name}")
        else:
            axes = ", ".join(f"self->{name}[{axis}]" for axis in range(3))
            values.append(f"emu_make<uint, 3>({axes})")
    return (
        'extern "C" EMU_UNCHECKED void emu_entry(void* const* buffers, const emu_thread* self) '
        f"{{ {text.instance}({', '.join(values)}); }}"
    )


def _input_buffers(arrays: dict[str, mx.array]) -> dict[str, Buffer]:
    buffers: dict[str, Buffer] = {}
    for name, array in arrays.items():
        strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
        facts = {
            name: _to_bytes(array),
            f"{name}_shape": np.array(array.shape, np.int32).view(np.uint8),
            f"{name}_strides": np.array(strides, np.int64).view(np.uint8),
            f"{name}_ndim": np.array([array.ndim], np.int32).view(np.uint8),
        }
        buffers |= {fact: Buffer(fact, data) for fact, data in facts.items()}
    return buffers


def _output_buffer(
    name: str, shape: Sequence[int], dtype: mx.Dtype, initial: float | None
) -> Buffer:
    if initial is not None:
        return Buffer(name, _to_bytes(mx.full(shape, initial, dtype)), True, True)
    return Buffer(name, np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8), True)


def _to_bytes(array: mx.array) -> np.ndarray[Any, Any]:
    """A flat, writable copy of an array's bytes."""
    flat = mx.contiguous(array).reshape(-1)
    flat = flat.astype(mx.uint8) if flat.dtype == mx.bool_ else flat.view(mx.uint8)
    return np.array(flat)


def _to_array(data: np.ndarray[Any, Any], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bool_:
        return mx.array(data).astype(mx.bool_).reshape(shape)
    return mx.array(data).view(dtype).reshape(shape)

"""The Metal source that MLX makes of a kernel body: its signature, template and instance."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

ATTRIBUTES = {  # in the order in which MLX appends them
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

ARRAY_FACTS = (("shape", "int", "*"), ("strides", "int64_t", "*"), ("ndim", "int", "&"))
CONSTANT_BELOW = 8  # inputs with fewer elements arrive in the constant address space

Template = Sequence[tuple[str, mx.Dtype | int | bool]]


@dataclass(frozen=True)
class Parameter:
    """One buffer of a kernel: its C type, `*` or `&`, and its name."""

    ctype: str
    kind: str
    name: str


@dataclass(frozen=True)
class KernelText:
    """A whole Metal source with what is needed to call it.

    Attributes:
        instance: the kernel's name with its template arguments.
        source: header, signature and body.
        parameters: its buffers in order.
        attributes: names of the thread attributes that follow them.
    """

    instance: str
    source: str
    parameters: list[Parameter]
    attributes: list[str]


def assemble(
    name: str,
    inputs: dict[str, mx.array],
    outputs: dict[str, mx.Dtype],
    body: str,
    *,
    header: str = "",
    template: Template = (),
    atomic_outputs: bool = False,
) -> KernelText:
    """Put a body into the signature that `mx.fast.metal_kernel` writes for these arguments."""
    values = ", ".join(_template_value(value) for _, value in template)
    function = "custom_kernel_" + name
    if template:
        function += "__" + values.replace(", ", "_")
    for array in inputs.values():
        function += "_" + TYPES[array.dtype] + _space_mark(array)
    function += "".join("_" + TYPES[dtype] for dtype in outputs.values())

    parameters, lines = _input_parameters(inputs, body)
    for output, dtype in outputs.items():
        ctype = f"atomic<{TYPES[dtype]}>" if atomic_outputs else TYPES[dtype]
        lines.append(f"device {ctype}* {output} [[buffer({len(lines)})]]")
        parameters.append(Parameter(ctype, "*", output))
    attributes = [attribute for attribute in ATTRIBUTES if attribute in body]
    lines += [f"{ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" for attribute in attributes]

    signature = f"[[kernel]] void {function}(\n  " + ",\n  ".join(lines) + ") {\n"
    instance = f"{function}<{values}>" if template else function
    source = header + _template_line(template) + signature + body + "\n}\n"
    if template:
        source += (
            f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n'
        )
    return KernelText(instance, source, parameters, attributes)


def _input_parameters(inputs: dict[str, mx.array], body: str) -> tuple[list[Parameter], list[str]]:
    parameters: list[Parameter] = []
    lines: list[str] = []
    for name, array in inputs.items():
        space = "constant" if array.size < CONSTANT_BELOW else "device"
        kind, ctype = ("*" if array.ndim else "&"), TYPES[array.dtype]
        lines.append(f"const {space} {ctype}{kind} {name} [[buffer({len(lines)})]]")
        parameters.append(Parameter(f"const {ctype}", kind, name))
        for fact, fact_type, fact_kind in ARRAY_FACTS if array.ndim else ():
            fact_name = f"{name}_{fact}"
            if fact_name in body:
                lines.append(
                    f"const constant {fact_type}{fact_kind} {fact_name} [[buffer({len(lines)})]]"
                )
                parameters.append(Parameter(f"const {fact_type}", fact_kind, fact_name))
    return parameters, lines


def _space_mark(array: mx.array) -> str:
    if array.ndim == 0:
        return "s"
    return "c" if array.size < CONSTANT_BELOW else ""


def _template_value(value: mx.Dtype | int | bool) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))


def _template_line(template: Template) -> str:
    if not template:
        return ""
    kinds = [
        "typename" if isinstance(v, mx.Dtype) else "bool" if isinstance(v, bool) else "int"
        for _, v in template
    ]
    parameters = ", ".join(
        f"{kind} {name}" for kind, (name, _) in zip(kinds, template, strict=True)
    )
    return f"template <{parameters}>\n"

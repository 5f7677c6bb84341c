"""What Metal refuses or runs wrongly and C++ accepts: rules over the text of a body.

The emulator finds the rest while compiling and running; `kernel.py` checks launches.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from metal_emu.signature import ATTRIBUTES

from turbospark.kernels.gpu.kernel import MAX_BINDINGS, strip_comments

FACTS = ("shape", "strides", "ndim")
TYPES = r"(?:float|int|uint|ushort|uchar|bool|half|bfloat16_t|T|KV|Pack<[^<>]*>|Floats<\d>)"
SPACES = r"(?:GLOBAL|SHARED_PTR|thread)"
BANNED_WORDS = (
    *("virtual", "try", "throw", "catch", "new", "delete", "goto", "return", "asm"),
    *("static", "thread_local", "function_constant", "mem_none", "reinterpret_cast"),
    *("double", "long", "ulong", "size_t", "int64_t", "uint64_t"),
)
MLX_NAMES = ("Limits", "elem_to_loc", "ceildiv", "bfloat16_t", "WorkPerThread")


@dataclass(frozen=True)
class Body:
    """A body under lint.

    Attributes:
        text: as in its file.
        inputs, outputs: names of its arrays.
        long_inputs: inputs that never have fewer than 8 elements, so that they are always in the
            device address space and may be pointed into.
        aligned: pointers whose vector loads are proven to be aligned.
    """

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    long_inputs: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()

    @property
    def code(self) -> str:
        """The text without comments."""
        return strip_comments(self.text)


def pointers_have_a_space(body: Body) -> Iterator[str]:
    for match in re.finditer(rf"(\w+\s+)?(const\s+)?\b{TYPES}\s*[*&](?![&=])", body.code):
        if not re.search(rf"\b{SPACES}\b", match[0]):
            yield f"pointer or reference without an address space: {match[0]!r}"


def short_inputs_are_only_indexed(body: Body) -> Iterator[str]:
    for name in body.inputs:
        uses = re.findall(rf"(?<![\w.]){name}\b(?!\s*\[)", body.code)
        if uses and name not in body.long_inputs:
            yield f"{name!r} may be in the constant address space and is passed on by pointer"


def names_do_not_bind_by_accident(body: Body) -> Iterator[str]:
    facts = [f"{name}_{fact}" for name in body.inputs for fact in FACTS]
    for name in [*facts, *ATTRIBUTES]:
        if len(re.findall(name, body.code)) != len(re.findall(rf"\b{name}\b", body.code)):
            yield f"a longer name contains {name!r}, which MLX then binds"


def bindings_are_few(body: Body) -> Iterator[str]:
    facts = [f"{name}_{fact}" for name in body.inputs for fact in FACTS]
    count = len(body.inputs) + len(body.outputs) + sum(fact in body.code for fact in facts)
    if count > MAX_BINDINGS:
        yield f"{count} bindings, more than {MAX_BINDINGS}"


def text_is_ascii(body: Body) -> Iterator[str]:
    if not body.text.isascii():
        yield "bytes that are not ASCII"


def mlx_names_are_left_alone(body: Body) -> Iterator[str]:
    for name in MLX_NAMES:
        if re.search(rf"(?:struct|class|using|#define|typedef[^;]*)\s+{name}\b", body.code):
            yield f"{name} is a name of MLX's own header"
    if re.search(r"\bnamespace\s+metal\b", body.code):
        yield "a definition inside namespace metal"


def language_is_metal(body: Body) -> Iterator[str]:
    for word in BANNED_WORDS:
        if re.search(rf"\b{word}\b", body.code):
            yield f"{word!r} has no place in a body"
    if "std::" in body.code:
        yield "std:: does not exist in Metal"
    if re.search(r"\[[=&]?\]\s*\(", body.code):
        yield "lambdas are refused before Metal 4"
    if re.search(r"\(\s*\*\s*\w+\s*\)\s*\(", body.code):
        yield "function pointers do not exist in Metal"


def literals_are_floats(body: Body) -> Iterator[str]:
    for literal in re.findall(r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?(?![\dfe.])", body.code):
        yield f"{literal} is a double on CUDA"


def vector_types_are_packs(body: Body) -> Iterator[str]:
    for word in re.findall(r"\b(?:packed_)?(?:float|half|bfloat|int|uint)[234]\b", body.code):
        yield f"{word}: only Pack is the same on every target"


def wide_loads_are_aligned(body: Body) -> Iterator[str]:
    for base in re.findall(r"load_pack<[^>]*>\(\s*(\w+)", body.code):
        if base not in body.aligned:
            yield f"load_pack from {base!r}, whose alignment nobody has proven"


def nothing_is_atomic(body: Body) -> Iterator[str]:
    if "atomic" in body.code:
        yield "atomics order nothing between threadgroups"


def private_arrays_are_unrolled(body: Body) -> Iterator[str]:
    unrolled = set(re.findall(r"UNROLL\s+for\s*\(int (\w+)", body.code))
    rolled = set(re.findall(r"(?<!UNROLL )for\s*\(int (\w+)", body.code)) - unrolled
    arrays = re.findall(rf"(?<!SHARED )\b{TYPES}\s+(\w+)\[", body.code)
    for name in arrays:
        for index in re.findall(rf"\b{name}((?:\[[^\]]*\])+)", body.code):
            for word in re.findall(r"[a-z_]\w*", index):
                if word not in unrolled or word in rolled:
                    yield f"{name}{index} is indexed by {word!r} at run time, so it lies in memory"


def data_flows_one_way(body: Body) -> Iterator[str]:
    for name in body.inputs:
        if re.search(rf"\b{name}\[[^;]*?\]\s*[-+*/|&]?=(?!=)", body.code):
            yield f"input {name!r} is written"
    for name in body.outputs:
        uses = re.findall(rf"(?<![\w.]){name}\b", body.code)
        stores = re.findall(rf"^\s*{name}\[[^;=]*\]\s*=(?!=)", body.code, re.MULTILINE)
        stores += re.findall(rf"^\s*store_pack<[^<>]*>\({name} \+", body.code, re.MULTILINE)
        if len(uses) != len(stores):
            yield f"output {name!r} is read, or used otherwise than by a plain store"


def loops_do_not_divide(body: Body) -> Iterator[str]:
    slow = r"[/%]\s*(?:\(?[a-z_]\w*\b(?!<))|(?<!fast::)\b(?:exp|exp2|log|log2|sin|cos|pow|rsqrt)\("
    for inner in _loop_bodies(body.code):
        for match in re.finditer(slow, inner):
            yield f"{match[0]!r} in a loop: hoist it"


def _loop_bodies(code: str) -> Iterator[str]:
    for match in re.finditer(r"\bfor\s*\([^{]*?\)\s*\{", code):
        depth, at = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
        yield code[match.end() : at]


RULES: tuple[Callable[[Body], Iterator[str]], ...] = (
    pointers_have_a_space,
    short_inputs_are_only_indexed,
    names_do_not_bind_by_accident,
    bindings_are_few,
    text_is_ascii,
    mlx_names_are_left_alone,
    language_is_metal,
    literals_are_floats,
    vector_types_are_packs,
    wide_loads_are_aligned,
    nothing_is_atomic,
    private_arrays_are_unrolled,
    data_flows_one_way,
    loops_do_not_divide,
)

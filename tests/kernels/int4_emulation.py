"""The emulator as a target for 4-bit products on tensor cores: bodies that only CUDA has."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import metal_emu
import mlx.core as mx
from kernels.cases_gpu import EMULATION, emulated

from turbospark.kernels.gpu.kernel import GpuTarget, header, strip_comments

_SHARED = "extern __shared__ __align__(128) unsigned char shared[];"
_FOLDER = Path(__file__).parents[2] / "turbospark/kernels/gpu/dialect"


def int4_emulation(
    *,
    order: int = 0,
    blocks: int | None = None,
    old: str = "",
    new: str = "",
    mutated: str = "int4_chain",
    launched: list[str] | None = None,
) -> GpuTarget:
    """A target that runs int4_mma and int4_chain, one block after another.

    Args:
        order: how threads take turns.
        blocks: how many blocks run at most; by default all.
        old: text of a body or its helpers that `new` takes the place of, if any.
        new: a planted mistake.
        mutated: how the names of kernels begin that have it.
        launched: notes the names of kernels that are built.
    """
    metal_emu.require_emulator()

    def build(**names: Any) -> Callable[..., Sequence[mx.array]]:
        if launched is not None:
            launched.append(names["name"])
        if not names["name"].startswith(("int4_mma", "int4_chain")):
            return emulated(order, **names)
        source, opening = names["source"], _header(names["header"])
        if old and names["name"].startswith(mutated):
            assert old in source + opening, f"no {old!r} to mutate"
            source, opening = source.replace(old, new), opening.replace(old, new)
        shared = f"threadgroup uchar shared[{names.pop('shared_memory')}];"
        names |= {"source": source.replace(_SHARED, shared), "header": opening}
        counts = "counters" in names["input_names"]
        if counts:
            where = names["input_names"].index("counters")
            names["input_names"] = [n for n in names["input_names"] if n != "counters"]
            names["output_names"] = [*names["output_names"], "counters"]
        kernel = metal_emu.metal_kernel(**names, order=order, threadgroup_bytes=227 << 10)

        def launch(**call: Any) -> Sequence[mx.array]:
            if blocks is not None:
                width = call["threadgroup"][0]
                call["grid"] = (min(call["grid"][0], blocks * width), 1, 1)
            if not counts:
                return kernel(**call)
            inputs = list(call["inputs"])
            counters = inputs.pop(where)
            call["output_shapes"] = [*call["output_shapes"], counters.shape]
            call["output_dtypes"] = [*call["output_dtypes"], counters.dtype]
            return kernel(**call | {"inputs": inputs}, init_value=0.0)[:-1]

        return launch

    return GpuTarget("emulation", "metal.h", build, "cuda")


def _header(given: str) -> str:
    """The header of a body with the emulator's tensor cores in place of the GPU's."""
    macros = re.findall(r"^#define (?:PARTS \d+|PAIR|ZEROS \d+|SUMMED)$", given, re.MULTILINE)
    parts, steps = (
        strip_comments((_FOLDER / name).read_text("ascii")) for name in ("parts.h", "cuda_int4.h")
    )
    own = strip_comments(Path(__file__).with_name("int4_emulation.h").read_text("ascii"))
    return header(EMULATION) + "\n".join([*macros, parts, own, steps])

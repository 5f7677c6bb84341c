"""Which experts the bodies of a GPU serve, and the launch that ranks them for any number of rows.

Their references are in kernels/experts.py.
"""

import functools
import zlib
from collections.abc import Mapping
from typing import TypeGuard

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.int4_product import FLOATS, GROUP_SIZES, Template
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, Triple
from turbospark.kernels.weights import ClampedSwiGLU, ExpertWeights, QuantizedWeight, Weight

ROUTE = Kernel("experts_route", ("scores", "scale"), ("ids", "weights"), helpers=("experts.h",))

MAX_EXPERTS = 512
MAX_TOP = 16
MAX_GROUPS = 32

_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
_CLAMPED = 3


def takes(experts: ExpertWeights) -> bool:
    """Whether the bodies serve these experts."""
    gate, up, down = experts.gate, experts.up, experts.down
    gate_bias, up_bias, _ = experts.biases
    is_named = isinstance(experts.activation, ClampedSwiGLU) or experts.activation in _ACTIVATIONS
    return (
        is_codes(gate)
        and is_codes(up)
        and is_codes(down)
        and len(gate.shape) == 3
        and layout(gate) == layout(up)
        and gate.shape[0] <= MAX_EXPERTS
        and 1 <= experts.top_k <= min(MAX_TOP, gate.shape[0])
        and is_named
        and (gate_bias is None) == (up_bias is None)
        and all(bias is None or bias.dtype in FLOATS for bias in experts.biases)
    )


def takes_groups(count: int, groups: tuple[int, int] | None, top_k: int) -> bool:
    """Whether experts can be ranked in these groups."""
    if groups is None:
        return True
    number, kept = groups
    if not 1 <= kept <= number <= MAX_GROUPS or count % number:
        return False
    return top_k <= kept * (count // number)


def is_codes(w: Weight) -> TypeGuard[QuantizedWeight]:
    """Whether a body reads this weight: 4-bit codes, affine or MXFP4."""
    if not isinstance(w, QuantizedWeight) or w.bits != 4 or w.scales.size < 8:
        return False
    if w.mode == "mxfp4":
        return w.group_size == 32 and w.scales.dtype == mx.uint8
    return (
        w.group_size in GROUP_SIZES
        and w.scales.dtype in FLOATS
        and (w.biases is None or w.biases.dtype == w.scales.dtype)
    )


def experts_route(
    scores: mx.array,
    top_k: int,
    scale: mx.array | None = None,
    *,
    renormalise: bool = True,
    groups: tuple[int, int] | None = None,
    target: GpuTarget,
) -> tuple[mx.array, mx.array]:
    """Rank experts and weigh the first ones, as `route_reference` does.

    Args:
        scores: [T, E] of at most 512 experts, any number of rows.
        top_k: experts a row, at most 16.
        scale: [E], multiplied to the weights, or None.
        renormalise: make the weights of a row sum to 1 before that.
        groups: number of groups of neighbours, and how many a row's experts may come from.
        target: where.

    Returns:
        ids [T, k] int32 and weights [T, k] float32.

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    if scores.ndim != 2 or not scores.size or scores.shape[1] > MAX_EXPERTS:
        raise ShapeError(f"experts_route takes scores of 1 to {MAX_EXPERTS}, not {scores.shape}")
    T, E = scores.shape
    check_ranks(E, top_k, scale, groups)
    ids, weights = ROUTE(
        target,
        [scores, scores if scale is None else scale],
        template={"HAS_SCALE": scale is not None} | rank_template(E, top_k, renormalise, groups),
        grid=(32, T, 1),
        threadgroup=(32, 1, 1),
        outputs=[((T, top_k), mx.int32), ((T, top_k), mx.float32)],
    )
    return ids, weights


def check_ranks(E: int, top_k: int, scale: mx.array | None, groups: tuple[int, int] | None) -> None:
    """Refuse ranks that no body gives.

    Raises:
        ShapeError: naming what is outside the bounds.
    """
    if not 1 <= top_k <= min(MAX_TOP, E):
        raise ShapeError(f"a body ranks 1 to {min(MAX_TOP, E)} of {E} experts, not {top_k}")
    if scale is not None and scale.shape != (E,):
        raise ShapeError(f"a body takes a scale {(E,)} of {E} experts, not {scale.shape}")
    if not takes_groups(E, groups, top_k):
        raise ShapeError(f"a body cannot rank {top_k} of {E} experts in groups {groups}")


def rank_template(
    E: int, top_k: int, renormalise: bool, groups: tuple[int, int] | None
) -> Template:
    """What ranks depend on."""
    number, kept = groups or (1, 1)
    return {
        "E": E,
        "TOP": top_k,
        "VALUES": -(-E // 32),
        "RENORMALISE": renormalise and groups is None,
        "GROUPS": number,
        "KEPT": kept,
    }


def activation_of(experts: ExpertWeights) -> tuple[int, tuple[float, float]]:
    """The number of an activation in the bodies, and the two numbers that it takes."""
    clamped = experts.activation
    if isinstance(clamped, ClampedSwiGLU):
        return _CLAMPED, (clamped.alpha, clamped.limit)
    return _ACTIVATIONS[clamped], (0.0, 0.0)


def layouts(experts: ExpertWeights) -> list[tuple[object, ...]]:
    """What a launch's template depends on, for gate, up and down."""
    given = (experts.gate, experts.up, experts.down)
    return [(*w.shape, *layout(w)) for w in given if isinstance(w, QuantizedWeight)]


def layout(w: QuantizedWeight) -> tuple[object, ...]:
    """What two weights that one body reads have in common."""
    return w.shape[-1], w.mode, w.group_size, w.zero, w.scales.dtype, w.biases is None


def code_template(w: QuantizedWeight) -> Template:
    """How a body reads codes."""
    return {
        "MODE": int(w.mode == "mxfp4"),
        "GROUP": w.group_size,
        "HAS_BIASES": w.biases is not None,
        "ZERO": w.zero or 0,
    }


def launch(
    target: GpuTarget,
    body: str,
    names: Mapping[str, mx.array | str],
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]],
    *,
    template: Template,
    grid: Triple,
    threadgroup: Triple,
    bundle: Bundle | None = None,
) -> list[mx.array]:
    """Launch a body with the arrays that there are.

    Args:
        target: where.
        body: its name.
        names: the body's own, of arrays; or of macros, as which an absent array has the name of
            another one that the body then never reads: every input costs time of the host.
        outputs: shapes and dtypes by the body's names.
        template, grid, threadgroup, bundle: as of a `Kernel`.
    """
    given = {name: x for name, x in names.items() if isinstance(x, mx.array)}
    macros = tuple(f"{name} {text}" for name, text in names.items() if isinstance(text, str))
    kernel = _kernel(body, tuple(given), tuple(outputs), macros)
    # A built kernel is found by its name and template alone.
    form = {"FORM": zlib.crc32(" ".join((*given, *macros)).encode()) >> 1}
    return kernel(
        target,
        list(given.values()),
        template=template | form,
        grid=grid,
        threadgroup=threadgroup,
        outputs=list(outputs.values()),
        bundle=bundle,
    )


@functools.cache
def _kernel(
    body: str, inputs: tuple[str, ...], outputs: tuple[str, ...], macros: tuple[str, ...]
) -> Kernel:
    return Kernel(body, inputs, outputs, macros=macros, helpers=("experts.h",))

"""Routed experts of up to eight rows on a GPU: ranks, hidden rows and their sum, a launch each.

Their references are in kernels/experts.py.
"""

from typing import TypeGuard

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.experts_geometry import (
    ExpertGeometry,
    down_geometry,
    up_geometry,
    words_of,
)
from turbospark.kernels.gpu.int4_product import FLOATS, GROUP_SIZES, MAX_ROWS
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant
from turbospark.kernels.target import SharedRows
from turbospark.kernels.weights import ExpertWeights, Norm, QuantizedWeight, Weight

ROUTE = Kernel("experts_route", ("scores", "scale"), ("ids", "weights"), helpers=("experts.h",))
UP = Kernel(
    "experts_up",
    (
        *("x", "norm_weight", "numbers", "ids"),
        *("gate_codes", "gate_scales", "gate_biases", "up_codes", "up_scales", "up_biases"),
    ),
    ("hidden",),
    helpers=("experts.h",),
)
DOWN = Kernel(
    "experts_down",
    ("hidden", "ids", "weights", "codes", "scales", "biases", "gate", "shared"),
    ("y",),
    helpers=("experts.h",),
)

MAX_EXPERTS = 512
MAX_TOP = 16

_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}


def takes(experts: ExpertWeights) -> bool:
    """Whether the bodies serve these experts."""
    gate, up, down = experts.gate, experts.up, experts.down
    return (
        _is_int4(gate)
        and _is_int4(up)
        and _is_int4(down)
        and _layout(gate) == _layout(up)
        and gate.shape[0] <= MAX_EXPERTS
        and 1 <= experts.top_k <= min(MAX_TOP, gate.shape[0])
        and experts.activation in _ACTIVATIONS
        and all(bias is None for bias in experts.biases)
    )


def experts_route(
    scores: mx.array,
    top_k: int,
    scale: mx.array | None = None,
    *,
    renormalise: bool = True,
    target: GpuTarget,
) -> tuple[mx.array, mx.array]:
    """Rank experts and weigh the first ones, as `route_reference` does.

    Args:
        scores: [T, E] of at most 512 experts, any number of rows.
        top_k: experts a row, at most 16.
        scale: [E], multiplied to the weights, or None.
        renormalise: make the weights of a row sum to 1 before that.
        target: where.

    Returns:
        ids [T, k] int32 and weights [T, k] float32.

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    if scores.ndim != 2 or not scores.size or scores.shape[1] > MAX_EXPERTS:
        raise ShapeError(f"experts_route takes scores of 1 to {MAX_EXPERTS}, not {scores.shape}")
    T, E = scores.shape
    if not 1 <= top_k <= min(MAX_TOP, E):
        raise ShapeError(f"experts_route ranks 1 to {min(MAX_TOP, E)} of {E} experts, not {top_k}")
    if scale is not None and scale.shape != (E,):
        raise ShapeError(f"experts_route of {E} experts takes a scale {(E,)}, not {scale.shape}")
    ids, weights = ROUTE(
        target,
        [scores, scores if scale is None else scale],
        template={
            "E": E,
            "TOP": top_k,
            "VALUES": -(-E // 32),
            "HAS_SCALE": scale is not None,
            "RENORMALISE": renormalise,
        },
        grid=(32, T, 1),
        threadgroup=(32, 1, 1),
        outputs=[((T, top_k), mx.int32), ((T, top_k), mx.float32)],
    )
    return ids, weights


def experts_up(
    x: mx.array,
    norm: Norm | None,
    ids: mx.array,
    experts: ExpertWeights,
    *,
    target: GpuTarget,
    geometry: ExpertGeometry | None = None,
) -> mx.array:
    """Hidden rows [M, k, I] float32 of every row's experts: act(gate y) * (up y), y = norm(x).

    Args:
        x: [M, C], 1 to 8 rows.
        norm: of x, or None.
        ids: [M, k] int32.
        experts: what `takes` accepts.
        target: where.
        geometry: by default `up_geometry`'s.

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    gate, up = _check_up(x, ids, experts)
    (E, inner, K), M, top_k = gate.shape, x.shape[0], experts.top_k
    cut = geometry or up_geometry(target.name, M * top_k * inner)
    weight = None if norm is None else norm.weight
    (hidden,) = UP(
        target,
        [
            x,
            x if weight is None else weight,
            constant(0.0 if norm is None else norm.eps),
            ids,
            *_arrays(gate),
            *_arrays(up),
        ],
        template=_template(gate)
        | {
            "E": E,
            "I": inner,
            "K": K,
            "TOP": top_k,
            "WORDS": words_of(K),
            "NORM": norm is not None,
            "HAS_NORM_WEIGHT": weight is not None,
            "ACTIVATION": _ACTIVATIONS[str(experts.activation)],
            "ROWS": cut.rows,
        },
        grid=(32, cut.groups(inner) * cut.simdgroups, M * top_k),
        threadgroup=(32, cut.simdgroups, 1),
        outputs=[((M, top_k, inner), mx.float32)],
    )
    return hidden


def experts_down(
    hidden: mx.array,
    ids: mx.array,
    weights: mx.array,
    experts: ExpertWeights,
    shared: SharedRows | None = None,
    *,
    dtype: mx.Dtype,
    target: GpuTarget,
    geometry: ExpertGeometry | None = None,
) -> mx.array:
    """Sum the weighted experts of every row, plus sigmoid(score) * the shared expert's row.

    Args:
        hidden: [M, k, I] float32, of 1 to 8 rows.
        ids: [M, k] int32.
        weights: [M, k] float32.
        experts: what `takes` accepts.
        shared: rows [M, C] and scores [M, 1], or None.
        dtype: of the result.
        target: where.
        geometry: by default `down_geometry`'s.

    Returns:
        [M, C].

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    down = _check_down(hidden, ids, weights, experts, shared)
    (E, N, inner), M, top_k = down.shape, hidden.shape[0], experts.top_k
    cut = geometry or down_geometry(target.name, M * N)
    (y,) = DOWN(
        target,
        [hidden, ids, weights, *_arrays(down), *(reversed(shared) if shared else [weights] * 2)],
        template=_template(down)
        | {
            "T": dtype,
            "E": E,
            "N": N,
            "I": inner,
            "TOP": top_k,
            "WORDS": words_of(inner),
            "BATCH": next(n for n in (8, 4, 3, 2, 1) if n * cut.rows <= 8 and top_k % n == 0),
            "HAS_SHARED": shared is not None,
            "ROWS": cut.rows,
        },
        grid=(32, cut.groups(N) * cut.simdgroups, M),
        threadgroup=(32, cut.simdgroups, 1),
        outputs=[((M, N), dtype)],
    )
    return y


def mix_experts(
    h: mx.array,
    norm: Norm | None,
    scores: mx.array,
    experts: ExpertWeights,
    shared: SharedRows | None,
    *,
    target: GpuTarget,
) -> mx.array:
    """The three launches, one after the other: h [M, C], scores [M, E] -> [M, C] like `h`."""
    ids, weights = experts_route(
        scores, experts.top_k, experts.scale, renormalise=experts.renormalise, target=target
    )
    hidden = experts_up(h, norm, ids, experts, target=target)
    return experts_down(hidden, ids, weights, experts, shared, dtype=h.dtype, target=target)


def _check_up(
    x: mx.array, ids: mx.array, experts: ExpertWeights
) -> tuple[QuantizedWeight, QuantizedWeight]:
    gate, up = experts.gate, experts.up
    if not takes(experts) or not _is_int4(gate) or not _is_int4(up):
        raise ShapeError("experts_up has no body for these experts")
    M, K, top_k = x.shape[0], gate.shape[2], experts.top_k
    if x.ndim != 2 or not 1 <= M <= MAX_ROWS or x.shape[1] != K or ids.shape != (M, top_k):
        raise ShapeError(
            f"experts_up takes 1 to {MAX_ROWS} rows of {K} values and {top_k} ids a row, not "
            f"x {x.shape} and ids {ids.shape}"
        )
    return gate, up


def _check_down(
    hidden: mx.array,
    ids: mx.array,
    weights: mx.array,
    experts: ExpertWeights,
    shared: SharedRows | None,
) -> QuantizedWeight:
    down = experts.down
    if not takes(experts) or not _is_int4(down):
        raise ShapeError("experts_down has no body for these experts")
    (_, N, inner), M, top_k = down.shape, hidden.shape[0], experts.top_k
    if not 1 <= M <= MAX_ROWS or hidden.shape != (M, top_k, inner) or ids.shape != weights.shape:
        raise ShapeError(
            f"experts_down takes hidden rows {(M, top_k, inner)} and as many ids as weights, not "
            f"{hidden.shape}, {ids.shape}, {weights.shape}"
        )
    if shared is not None and [x.shape for x in shared] != [(M, N), (M, 1)]:
        given = [x.shape for x in shared]
        raise ShapeError(f"experts_down adds a shared expert {[(M, N), (M, 1)]}, not {given}")
    return down


def _is_int4(w: Weight) -> TypeGuard[QuantizedWeight]:
    return (
        isinstance(w, QuantizedWeight)
        and w.mode == "affine"
        and w.bits == 4
        and w.group_size in GROUP_SIZES
        and len(w.shape) == 3
        and w.scales.dtype in FLOATS
        and (w.biases is None or w.biases.dtype == w.scales.dtype)
        and w.scales.size >= 8
    )


def layouts(experts: ExpertWeights) -> list[tuple[object, ...]]:
    """What a launch's template depends on, for gate, up and down."""
    given = (experts.gate, experts.up, experts.down)
    return [_layout(w) for w in given if isinstance(w, QuantizedWeight)]


def _layout(w: QuantizedWeight) -> tuple[object, ...]:
    return (*w.shape, w.group_size, w.zero, w.scales.dtype, w.biases is None)


def _arrays(w: QuantizedWeight) -> list[mx.array]:
    return [w.codes, w.scales, w.scales if w.biases is None else w.biases]


def _template(w: QuantizedWeight) -> dict[str, mx.Dtype | int | bool]:
    return {"GROUP": w.group_size, "HAS_BIASES": w.biases is not None, "ZERO": w.zero or 0}

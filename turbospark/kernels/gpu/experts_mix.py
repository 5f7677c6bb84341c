"""Routed experts of up to eight rows on a GPU: hidden rows, and their sum, a launch each.

Their references are in kernels/experts.py.
"""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.experts import (
    activation_of,
    check_ranks,
    code_template,
    is_codes,
    launch,
    layout,
    rank_template,
    takes,
)
from turbospark.kernels.gpu.experts_geometry import (
    down_geometry,
    parts_of,
    spread,
    up_geometry,
    words_of,
)
from turbospark.kernels.gpu.int4_product import MAX_ROWS
from turbospark.kernels.gpu.kernel import GpuTarget, constant
from turbospark.kernels.weights import (
    ExpertWeights,
    Norm,
    QuantizedWeight,
    SharedExpertWeights,
    Weight,
)

GATED, PLAIN, APART = 1, 2, 3
"""How a shared expert joins the sum: times a sigmoid, as it is, or in rows of its own."""


def notes_of(top_k: int) -> int:
    """Numbers behind the hidden rows of one row: weights, ids and the score of a shared expert."""
    return -(-(2 * top_k + 1) // 8) * 8


def takes_shared(experts: ExpertWeights, shared: SharedExpertWeights) -> bool:
    """Whether the bodies serve a shared expert beside these."""
    pairs = zip(
        (shared.gate, shared.up, shared.down),
        (experts.gate, experts.up, experts.down),
        strict=True,
    )
    return (
        shared.gate.shape == shared.up.shape
        and is_codes(shared.down)
        and shared.down.scales.size >= 8
        and all(is_codes(one) and is_codes(many) and _own(one) == _own(many) for one, many in pairs)
    )


def _own(w: QuantizedWeight) -> tuple[object, ...]:
    return layout(w)[1:]


def experts_up(
    x: mx.array,
    norm: Norm | None,
    scores: mx.array,
    experts: ExpertWeights,
    shared: SharedExpertWeights | None = None,
    *,
    groups: tuple[int, int] | None = None,
    target: GpuTarget,
    bundle: Bundle | None = None,
) -> mx.array:
    """Rank every row's experts and make their hidden rows: joined gate y and up y, y = norm(x).

    Args:
        x: [M, C], 1 to 8 rows.
        norm: of x, or None.
        scores: [M, E] float32, or [M, E + 1] with those of a shared expert's gate.
        experts: what `takes` accepts.
        shared: one that `takes_shared` accepts, with a norm of the same eps, or None.
        groups: number of groups of experts, and how many a row's may come from.
        target: where.
        bundle: where what never changes lies side by side, if it does.

    Returns:
        [M, k * I + J + notes] float32: hidden rows in rank order, the shared expert's, each in the
        order in which lanes read them, and what `experts_down` needs to know: weights, ids, the
        gate's score.

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    gate, up = _check_up(x, scores, experts, norm, shared, groups)
    (E, inner, K), M, top_k = gate.shape, x.shape[0], experts.top_k
    width = 0 if shared is None else shared.gate.shape[0]
    cut = up_geometry(target.name, K, shared=shared is not None)
    words = words_of(K)
    parts = parts_of(K, words)
    split = spread(parts, cut.simdgroups)
    teams = max(1, cut.simdgroups // split)
    slot, rest = (-(-n // (teams * cut.columns)) for n in (inner, width))
    weight = None if norm is None else norm.weight
    wide = top_k * inner + width + notes_of(top_k)
    (hidden,) = launch(
        target,
        "experts_up",
        {
            **_shared_names(shared, weight),
            "x": x,
            "norm_weight": "x" if weight is None else weight,
            "numbers": up_numbers(norm, experts),
            "scores": scores,
            "expert_scale": "numbers" if experts.scale is None else experts.scale,
            **_arrays("gate", gate),
            **_arrays("up", up),
            "gate_bias": "numbers" if experts.biases[0] is None else experts.biases[0],
            "up_bias": "numbers" if experts.biases[1] is None else experts.biases[1],
        },
        {"hidden": ((M, wide), mx.float32)},
        template=code_template(gate)
        | rank_template(E, top_k, experts.renormalise, groups)
        | {
            "I": inner,
            "IS": width,
            "K": K,
            "WIDTH": wide,
            "SCORES": scores.shape[1],
            "PER_SLOT": slot,
            "WORDS": words,
            "DOWN_WORDS": words_of(inner),
            "PARTS": parts,
            "SPLIT": split,
            "TURNS": -(-parts // split),
            "TEAMS": teams,
            "COLUMNS": cut.columns,
            "AHEAD": cut.ahead,
            "NORM": norm is not None,
            "HAS_NORM_WEIGHT": weight is not None,
            "HAS_SCALE": experts.scale is not None,
            "HAS_BIAS": experts.biases[0] is not None,
            "ACTIVATION": activation_of(experts)[0],
        },
        grid=(32, (top_k * slot + rest) * teams * split, M),
        threadgroup=(32, teams * split, 1),
        bundle=bundle,
    )
    return hidden


def experts_down(
    hidden: mx.array,
    experts: ExpertWeights,
    shared: SharedExpertWeights | None = None,
    residual: mx.array | None = None,
    *,
    join: int = PLAIN,
    dtype: mx.Dtype,
    target: GpuTarget,
    bundle: Bundle | None = None,
) -> mx.array:
    """Sum the weighted experts of every row, the shared one and the residual.

    Args:
        hidden: what `experts_up` made of 1 to 8 rows.
        experts: the same as there.
        shared: the same as there.
        residual: [M, C], or None.
        join: GATED, PLAIN or APART, how the shared expert is added.
        dtype: of the result.
        target: where.
        bundle: where what never changes lies side by side, if it does.

    Returns:
        [M, C]; if APART [M, 2, C] float32, the experts' sum and the shared one's output.

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    down = _check_down(hidden, experts, shared, residual)
    (E, N, inner), M, top_k = down.shape, hidden.shape[0], experts.top_k
    width = 0 if shared is None else shared.down.shape[1]
    form = 0 if shared is None else join
    cut, bias = down_geometry(target.name, M * N), experts.biases[2]
    words = words_of(inner)
    parts, shared_parts = parts_of(inner, words), parts_of(width, words)
    simdgroups = spread(top_k * parts + shared_parts, cut.simdgroups)
    (y,) = launch(
        target,
        "experts_down",
        {
            "SHARED_EXPERT": str(form),
            "hidden": hidden,
            **_arrays("", down),
            "bias": "hidden" if bias is None else bias,
            **({} if shared is None else _arrays("shared", shared.down)),
            "residual": "hidden" if residual is None else residual,
        },
        {"y": ((M, 2, N), mx.float32) if form == APART else ((M, N), dtype)},
        template=code_template(down)
        | {
            "T": mx.float32 if form == APART else dtype,
            "E": E,
            "N": N,
            "I": inner,
            "IS": width,
            "WIDTH": hidden.shape[1],
            "TOP": top_k,
            "WORDS": words,
            "PARTS": parts,
            "SHARED_PARTS": shared_parts,
            "SIMDGROUPS": simdgroups,
            "COLUMNS": cut.columns,
            "AHEAD": cut.ahead,
            "HAS_BIAS": bias is not None,
            "RESIDUAL": residual is not None,
        },
        grid=(32, -(-N // cut.columns) * simdgroups, M),
        threadgroup=(32, simdgroups, 1),
        bundle=bundle,
    )
    return y


def up_numbers(norm: Norm | None, experts: ExpertWeights) -> mx.array:
    """What `experts_up` knows of norm and activation."""
    return constant((0.0 if norm is None else norm.eps, *activation_of(experts)[1]))


def _shared_names(
    shared: SharedExpertWeights | None, weight: mx.array | None
) -> dict[str, mx.array | str]:
    """What tells `experts_up` of a shared expert; `weight` is that of the experts' norm."""
    if shared is None:
        return {"SHARED_EXPERT": "0", "SHARED_NORM": "0"}
    own = None if shared.norm is None else shared.norm.weight
    is_own = own is not None and own is not weight
    return {
        "SHARED_EXPERT": "1",
        "SHARED_NORM": str(int(is_own)),
        **({"shared_norm_weight": own} if own is not None and is_own else {}),
        **_arrays("shared_gate", shared.gate),
        **_arrays("shared_up", shared.up),
    }


def _check_up(
    x: mx.array,
    scores: mx.array,
    experts: ExpertWeights,
    norm: Norm | None,
    shared: SharedExpertWeights | None,
    groups: tuple[int, int] | None,
) -> tuple[QuantizedWeight, QuantizedWeight]:
    gate, up = experts.gate, experts.up
    if not takes(experts) or not is_codes(gate) or not is_codes(up):
        raise ShapeError("experts_up has no body for these experts")
    (E, _, K), M = gate.shape, x.shape[0]
    check_ranks(E, experts.top_k, experts.scale, groups)
    if x.ndim != 2 or not 1 <= M <= MAX_ROWS or x.shape[1] != K:
        raise ShapeError(f"experts_up takes 1 to {MAX_ROWS} rows of {K} values, not x {x.shape}")
    if scores.shape not in ((M, E), (M, E + 1)) or scores.dtype != mx.float32:
        raise ShapeError(
            f"experts_up of {M} rows takes float32 scores {(M, E)} or {(M, E + 1)}, not "
            f"{scores.dtype} {scores.shape}"
        )
    if shared is not None and (
        not takes_shared(experts, shared)
        or shared.gate.shape[1] != K
        or not have_one_root(norm, shared.norm)
    ):
        raise ShapeError("experts_up has no body for this shared expert beside these")
    return gate, up


def have_one_root(a: Norm | None, b: Norm | None) -> bool:
    """Whether two norms divide a row by the same number."""
    if a is None or b is None:
        return a is b
    return a.eps == b.eps and (a.weight is None) == (b.weight is None)


def _check_down(
    hidden: mx.array,
    experts: ExpertWeights,
    shared: SharedExpertWeights | None,
    residual: mx.array | None,
) -> QuantizedWeight:
    down = experts.down
    if not takes(experts) or not is_codes(down):
        raise ShapeError("experts_down has no body for these experts")
    (_, N, inner), M, top_k = down.shape, hidden.shape[0], experts.top_k
    width = top_k * inner + (0 if shared is None else shared.down.shape[1]) + notes_of(top_k)
    if hidden.shape != (M, width) or not 1 <= M <= MAX_ROWS:
        raise ShapeError(
            f"experts_down takes hidden rows {(M, width)} of 1 to {MAX_ROWS}, not {hidden.shape}"
        )
    if residual is not None and residual.shape != (M, N):
        raise ShapeError(f"experts_down adds a residual {(M, N)}, not {residual.shape}")
    return down


def _arrays(name: str, w: Weight) -> dict[str, mx.array | str]:
    """The arrays of a weight under the body's names."""
    assert isinstance(w, QuantizedWeight)
    stem = f"{name}_" if name else ""
    biases = f"{stem}scales" if w.biases is None else w.biases
    return {f"{stem}codes": w.codes, f"{stem}scales": w.scales, f"{stem}biases": biases}

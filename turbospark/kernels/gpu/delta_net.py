"""The gated delta net on a GPU: one launch for a few rows, three for many, the same bits.

Its references are in kernels/delta_net.py.
"""

import functools
from dataclasses import replace

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.delta_net import DeltaRows, check_delta_weights
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.delta_scan import (
    HELPERS,
    PROJECTED,
    RECORDED,
    SIMDGROUPS,
    ScanGeometry,
    delta_filter,
    delta_gate,
    delta_scan,
    fold_on,
    lanes,
    projected,
    recorded,
    scan_geometry,
    sizes_of,
)
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.target import DeltaGeometry, DeltaInputs, DeltaNet, DeltaState
from turbospark.kernels.weights import DeltaWeights, Norm
from turbospark.protocols import Phase, RowInputs

_STEP = ("z", "state", "norm_weight", "numbers", *PROJECTED)

STEP = Kernel(
    "delta_net",
    _STEP,
    ("y", "new_state", "new_tail"),
    takes_strides=True,
    macros=("RECORD 0",),
    helpers=HELPERS,
)
RECORD = Kernel(
    "delta_net_record",
    _STEP,
    ("y", "new_state", "new_tail", *RECORDED),
    takes_strides=True,
    body="delta_net",
    macros=("RECORD 1",),
    helpers=HELPERS,
)
MAX_ROWS = 8
"""Rows of a single launch at most."""

_SHARED_BYTES = 32 << 10  # of a threadgroup on Apple GPUs
_MOST_QUADS = 8  # of a lane: its part of a value row lies in registers


def takes(heads: DeltaGeometry, weights: DeltaWeights) -> bool:
    """Whether the bodies serve such a layer."""
    return (
        heads.key_dim % 4 == 0
        and heads.key_dim // (4 * lanes(heads)) <= _MOST_QUADS
        and heads.taps >= 2
        and rows_at_once(heads) >= 1
        and weights.norm.weight is not None
    )


def rows_at_once(heads: DeltaGeometry) -> int:
    """Rows that a single launch takes, which its memory bounds."""
    row_bytes = 4 * (2 * heads.key_dim + 2 * heads.value_dim + 2)
    return min(MAX_ROWS, _SHARED_BYTES // row_bytes)


def delta_net(
    inputs: DeltaInputs,
    state: DeltaState,
    heads: DeltaGeometry,
    weights: DeltaWeights,
    *,
    record: bool = False,
    target: GpuTarget,
    scan: ScanGeometry | None = None,
    bundle: Bundle | None = None,
) -> tuple[mx.array, DeltaState, DeltaRows | None]:
    """Fold T rows into the state of a delta-net layer.

    A row's result and the state after it are the same bits however the rows are cut into passes.

    Args:
        inputs: projections of T >= 1 rows; each may be columns of a wider array.
        state: rows before the filter [taps - 1, channels] and fast weights [Hv, Dv, Dk], float32,
            whole arrays; left as they are.
        heads: sizes.
        weights: of the layer.
        record: whether the row inputs are returned.
        target: where.
        scan: by default `scan_geometry`'s.
        bundle: where the layer's weights lie side by side, if they do.

    Returns:
        [T, Hv * Dv] in the dtype of the projections, the new state, the row inputs if asked for.

    Raises:
        ShapeError: the arrays are outside the bounds of the bodies.
    """
    _check(inputs, state, heads, weights)
    if inputs.qkv.shape[0] <= rows_at_once(heads):
        return _in_one_launch(inputs, state, heads, weights, record, target, bundle)
    tail, S = state
    q, k, v, decay, beta, new_tail = delta_filter(inputs, tail, heads, weights, target)
    cut = scan or scan_geometry(target.name, heads)
    x, new_S = delta_scan(S, q, (k, v, decay, beta), target, cut)
    y = delta_gate(x, inputs.z, weights, target)
    rows = DeltaRows(state, inputs.qkv, k, v, decay, beta, fold_on(target)) if record else None
    return y, (new_tail, new_S), rows


def _in_one_launch(
    inputs: DeltaInputs,
    state: DeltaState,
    heads: DeltaGeometry,
    weights: DeltaWeights,
    record: bool,
    target: GpuTarget,
    bundle: Bundle | None,
) -> tuple[mx.array, DeltaState, DeltaRows | None]:
    (tail, S), qkv = state, inputs.qkv
    T, Hv = qkv.shape[0], heads.num_value_heads
    Dk, Dv, LANES = heads.key_dim, heads.value_dim, lanes(heads)
    quads = Dk // (4 * LANES)
    sets = -(-Dv // (SIMDGROUPS * (32 // LANES)))
    held = max(1, min(sets, (64 if target.name == "cuda" else 32) // (4 * quads)))
    ahead = 3 * heads.taps * -(-max(Dk, Dv) // 32)  # of what a lane filters a row's head from
    early = (144 if target.name == "cuda" else 48) // ahead
    made = (RECORD if record else STEP)(
        target,
        [
            inputs.z,
            S,
            _norm_weight(weights),
            constant(weights.norm.eps),
            *projected(inputs, tail, weights),
        ],
        template=sizes_of(heads)
        | {
            "T": qkv.dtype,
            "M": T,
            "LANES": LANES,
            "QUADS": quads,
            "HELD": held,
            "TURNS": -(-sets // held),
            "EARLY": max(1, min(early, -(-3 * T // SIMDGROUPS))),
            "SILU": weights.gate == "silu",
            "SIMDGROUPS": SIMDGROUPS,
        },
        grid=(Hv * 32 * SIMDGROUPS, 1, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        outputs=[
            ((T, Hv * Dv), qkv.dtype),
            (S.shape, mx.float32),
            (tail.shape, mx.float32),
            *(recorded(T, heads) if record else []),
        ],
        bundle=bundle,
    )
    y, new_S, new_tail = made[:3]
    rows = None
    if record:
        k, v, decay, beta = made[3:]
        rows = DeltaRows(state, qkv, k, v, decay, beta, fold_on(target))
    return y, (new_tail, new_S), rows


def _norm_weight(weights: DeltaWeights) -> mx.array:
    if weights.norm.weight is None:
        raise ShapeError("delta_net has no body for a norm without a weight")
    return weights.norm.weight


def _check(
    inputs: DeltaInputs, state: DeltaState, heads: DeltaGeometry, weights: DeltaWeights
) -> None:
    check_delta_weights(heads, weights)
    if not takes(heads, weights):
        raise ShapeError(f"delta_net has no body for {heads}")
    T, Hv = inputs.qkv.shape[0], heads.num_value_heads
    found = [inputs.qkv.shape, inputs.z.shape, inputs.b.shape, inputs.a.shape]
    if T < 1 or found != [(T, heads.channels), (T, heads.values), (T, Hv), (T, Hv)]:
        raise ShapeError(f"delta_net of {heads} takes no projections {found}")
    wanted = [(heads.taps - 1, heads.channels), (Hv, heads.value_dim, heads.key_dim)]
    if [part.shape for part in state] != wanted or {x.dtype for x in state} != {mx.float32}:
        given = [(part.shape, part.dtype) for part in state]
        raise ShapeError(f"delta_net of {heads} takes a float32 state {wanted}, not {given}")


def bind_delta_net(
    heads: DeltaGeometry, weights: DeltaWeights, target: GpuTarget
) -> DeltaNet | None:
    """The unit of a layer, or None where no body serves it."""
    if not takes(heads, weights) or not _runs(heads, target):
        return None
    whole = replace(weights, conv=mx.contiguous(weights.conv))
    fixed = [whole.conv, whole.log_rate, whole.dt_bias, _norm_weight(whole)]
    bundle = Bundle.of([], [*fixed, constant(whole.norm.eps)])

    def run(
        inputs: DeltaInputs, state: DeltaState, phase: Phase, record: bool
    ) -> tuple[mx.array, DeltaState, RowInputs | None]:
        return delta_net(inputs, state, heads, whole, record=record, target=target, bundle=bundle)

    return run


@functools.cache
def _runs(heads: DeltaGeometry, target: GpuTarget) -> bool:
    Hv = heads.num_value_heads
    widths = (heads.channels, heads.values, Hv, Hv)

    def launch() -> list[mx.array]:
        gates, norm = mx.zeros(Hv), Norm(mx.zeros(heads.value_dim), 1e-6)
        weights = DeltaWeights(mx.zeros((heads.channels, heads.taps, 1)), gates, gates, norm)
        made: list[mx.array] = []
        for T in (1, MAX_ROWS + 1):
            inputs = DeltaInputs(*(mx.zeros((T, width), mx.bfloat16) for width in widths))
            y, state, _ = delta_net(inputs, heads.zero_state(), heads, weights, target=target)
            made += [y, *state]
        return made

    return runs("delta_net", str(heads), launch, target)

"""The parts of a delta net of many rows on a GPU: filter, scan and gate.

Their references are in kernels/delta_net.py.
"""

import functools
from dataclasses import dataclass

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.delta_net import DeltaRows, Fold
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant
from turbospark.kernels.target import DeltaGeometry, DeltaInputs
from turbospark.kernels.weights import DeltaWeights

HELPERS = ("delta.h",)
PROJECTED = ("qkv", "b", "a", "tail", "conv", "log_rate", "dt_bias")
RECORDED = ("k", "v", "decay", "beta")
SIMDGROUPS = 8

_SCANNED = ("k", "values", "decay", "beta")
FILTER = Kernel(
    "delta_filter",
    PROJECTED,
    ("q", *RECORDED, "new_tail"),
    takes_strides=True,
    helpers=HELPERS,
)
SCAN = Kernel(
    "delta_scan",
    ("state", "q", *_SCANNED),
    ("y", "new_state"),
    macros=("FOLD 0",),
    helpers=HELPERS,
)
FOLD = Kernel(
    "delta_fold",
    ("state", *_SCANNED),
    ("new_state",),
    body="delta_scan",
    macros=("FOLD 1",),
    helpers=HELPERS,
)
GATE = Kernel(
    "delta_gate",
    ("x", "z", "norm_weight", "numbers"),
    ("y",),
    takes_strides=True,
    helpers=HELPERS,
)


@dataclass(frozen=True, slots=True)
class ScanGeometry:
    """Of the scan over many rows.

    Attributes:
        held: value rows in a lane's registers.
        simdgroups: of a threadgroup.
        block: rows of keys that are fetched together.
    """

    held: int
    simdgroups: int
    block: int


def lanes(heads: DeltaGeometry) -> int:
    """Lanes that share a value row of the state: they and what each has give the order of sums."""
    return next(n for n in (8, 4, 2, 1) if heads.key_dim % (4 * n) == 0 or n == 1)


def scan_geometry(target: str, heads: DeltaGeometry) -> ScanGeometry:
    """The cut of the scan; the order of sums does not depend on it."""
    held = 2 if target == "cuda" and heads.key_dim <= 128 else 1
    return ScanGeometry(held, 4, 8 if heads.key_dim <= 128 else 4)


def delta_filter(
    inputs: DeltaInputs,
    tail: mx.array,
    heads: DeltaGeometry,
    weights: DeltaWeights,
    target: GpuTarget,
) -> list[mx.array]:
    """What comes before the delta rule: q, k, v, decay, beta, and the tail after the rows."""
    T = inputs.qkv.shape[0]
    items = T * (2 * heads.num_key_heads + heads.num_value_heads)
    queries = (T, heads.num_key_heads, heads.key_dim)
    return FILTER(
        target,
        projected(inputs, tail, weights),
        template=sizes_of(heads) | {"SIMDGROUPS": SIMDGROUPS},
        grid=(-(-items // SIMDGROUPS) * 32 * SIMDGROUPS, 1, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        outputs=[(queries, mx.float32), *recorded(T, heads), (tail.shape, mx.float32)],
    )


def delta_scan(
    S: mx.array,
    q: mx.array | None,
    rows: tuple[mx.array, ...],
    target: GpuTarget,
    cut: ScanGeometry | None = None,
) -> list[mx.array]:
    """The delta rule of T rows: what they read [T, Hv, Dv] if there are queries, and S after them.

    Args:
        S: [Hv, Dv, Dk] float32.
        q: [T, Hk, Dk] float32, or None.
        rows: k [T, Hk, Dk], v [T, Hv, Dv], decay [T, Hv], beta [T, Hv], all float32.
        target: where.
        cut: by default `scan_geometry`'s.
    """
    (Hv, Dv, Dk), (T, Hk, _) = S.shape, rows[0].shape
    heads = DeltaGeometry(Hk, Hv, Dk, Dv, 2)
    cut, LANES = cut or scan_geometry(target.name, heads), lanes(heads)
    threads, width = 32 * cut.simdgroups, Dk // 4 * (1 if q is None else 2)
    tile = cut.held * cut.simdgroups * (32 // LANES)
    read = [] if q is None else [((T, Hv, Dv), mx.float32)]
    return (FOLD if q is None else SCAN)(
        target,
        [S, *([] if q is None else [q]), *rows],
        template={
            "HK": Hk,
            "HV": Hv,
            "DK": Dk,
            "DV": Dv,
            "LANES": LANES,
            "QUADS": Dk // (4 * LANES),
            "HELD": cut.held,
            "SIMDGROUPS": cut.simdgroups,
            "BLOCK": cut.block,
            "WIDTH": width,
            "ROWS": tile,
            "PACKS": -(-cut.block * width // threads),
            "VALUES": -(-cut.block * tile // threads),
        },
        grid=(-(-Dv // tile) * threads, Hv, 1),
        threadgroup=(threads, 1, 1),
        outputs=[*read, (S.shape, mx.float32)],
    )


def delta_gate(x: mx.array, z: mx.array, weights: DeltaWeights, target: GpuTarget) -> mx.array:
    """rms_norm(x) * gate(z), head by head: x [T, Hv, Dv] float32, z [T, Hv * Dv].

    Raises:
        ShapeError: the norm has no weight.
    """
    (T, Hv, Dv), norm = x.shape, weights.norm
    if norm.weight is None:
        raise ShapeError("delta_net has no body for a norm without a weight")
    (y,) = GATE(
        target,
        [x, z, norm.weight, constant(norm.eps)],
        template={
            "T": z.dtype,
            "HV": Hv,
            "DV": Dv,
            "SIMDGROUPS": SIMDGROUPS,
            "SILU": weights.gate == "silu",
        },
        grid=(-(-T * Hv // SIMDGROUPS) * 32 * SIMDGROUPS, 1, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        outputs=[((T, Hv * Dv), z.dtype)],
    )
    return y


def _fold(rows: DeltaRows, target: GpuTarget) -> mx.array:
    given = (rows.k, rows.v, rows.decay, rows.beta)
    return delta_scan(rows.state[1], None, given, target)[0]


@functools.cache
def fold_on(target: GpuTarget) -> Fold:
    """What applies recorded rows to a state there, in the arithmetic of every pass."""
    return functools.partial(_fold, target=target)


def projected(inputs: DeltaInputs, tail: mx.array, weights: DeltaWeights) -> list[mx.array]:
    """Arrays in the order of PROJECTED."""
    own = [weights.conv, weights.log_rate, weights.dt_bias]
    return [inputs.qkv, inputs.b, inputs.a, tail, *own]


def sizes_of(heads: DeltaGeometry) -> dict[str, mx.Dtype | int | bool]:
    """Sizes of a layer as template arguments."""
    return {
        "HK": heads.num_key_heads,
        "HV": heads.num_value_heads,
        "DK": heads.key_dim,
        "DV": heads.value_dim,
        "TAPS": heads.taps,
    }


def recorded(T: int, heads: DeltaGeometry) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Shapes of RECORDED."""
    Hk, Hv = heads.num_key_heads, heads.num_value_heads
    shapes = [(T, Hk, heads.key_dim), (T, Hv, heads.value_dim), (T, Hv), (T, Hv)]
    return [(shape, mx.float32) for shape in shapes]

"""Norms, rotation and cache rows of the heads of a decode step, in one launch.

Its reference is composed of kernels/rms_norm.py and kernels/rope.py.
"""

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant, resident
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import Rope, rope_reference
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm

_WEIGHTS = ("q_weight", "k_weight", "v_weight")
KERNEL = Kernel(
    "head_norm_rope",
    ("q", "k", "v", "tail_k", "tail_v", *_WEIGHTS, "frequencies", "lengths", "numbers"),
    ("y", "new_k", "new_v"),
    takes_strides=True,
    helpers=("heads.h",),
)
MAX_ROWS = 16

_SIMDGROUPS = 4
_COPY_ROWS = 16  # of the tail, a threadgroup


@dataclass(frozen=True, slots=True, eq=False)
class HeadUnit:
    """What a layer does to its heads.

    Attributes:
        heads: their sizes.
        norms: of queries, keys and values; None for none.
        rope: rotates queries and keys.
        frequencies: the embedding's [P] inverse frequencies, zeros behind them.
    """

    heads: HeadGeometry
    norms: tuple[Norm | None, Norm | None, Norm | None]
    rope: Rope
    frequencies: mx.array

    @classmethod
    def build(
        cls,
        heads: HeadGeometry,
        rope: Rope,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        v_norm: Norm | None = None,
    ) -> Self:
        """Put a layer's norms and embedding together."""
        return cls(heads, (q_norm, k_norm, v_norm), rope, _frequencies(rope))


def head_norm_rope(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    rows: StepRows,
    unit: HeadUnit,
    *,
    target: GpuTarget,
) -> tuple[mx.array, RowBlock | None]:
    """Norm and rotate a step's heads; write the rows of keys and values behind those of the tail.

    q, k and v may be slices of one stacked projection, whose rows lie apart; along the last axis
    their numbers are dense.

    Args:
        q: [T, Hq * D], or [T, Hq, n] with n >= D whose first D numbers of a head count; 1 to 16
            rows, row i at position rows.lengths[1] + i.
        k: [T, Hkv * D], or None where another layer writes this step's rows.
        v: like k.
        rows: the tail has room for T rows more; `sealed` is not looked at.
        unit: norms and embedding.
        target: where.

    Returns:
        Rotated queries [T, Hq, D] in the dtype of `q`, and the new tail, None without k and v.

    Raises:
        ShapeError: shapes do not fit.
    """
    check(q, k, v, rows, unit)
    heads, has_kv, tail = unit.heads, k is not None, rows.tail
    weights = [
        unit.frequencies if norm is None or norm.weight is None else norm.weight
        for norm in unit.norms
    ]
    eps = [0.0 if norm is None else norm.eps for norm in unit.norms]
    head_groups, copies_a_head = _groups(q, tail, heads, has_kv)
    groups, threads = head_groups + 2 * heads.num_kv_heads * copies_a_head, 32 * _SIMDGROUPS
    y_shape = (q.shape[0], heads.num_heads, heads.head_dim)
    kv_shape = tail.k.shape if has_kv else (1, 1, 1)
    y, new_k, new_v = KERNEL(
        target,
        [
            q,
            q if k is None else k,
            q if v is None else v,
            tail.k,
            tail.v,
            *weights,
            unit.frequencies,
            rows.lengths,
            constant((*eps, unit.rope.magnitude)),
        ],
        template=_template(q, tail, unit, has_kv),
        grid=(groups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=[(y_shape, q.dtype), (kv_shape, tail.k.dtype), (kv_shape, tail.v.dtype)],
    )
    return y, RowBlock(new_k, new_v) if has_kv else None


def head_norm_rope_reference(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    offset: int | mx.array,
    unit: HeadUnit,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """The same in plain MLX operations: queries [T, Hq, D], rows of keys and values [T, Hkv, D]."""
    T, heads = q.shape[0], unit.heads
    q_norm, k_norm, v_norm = unit.norms
    queries = mx.reshape(q, (T, heads.num_heads, -1))[..., : heads.head_dim]
    queries = rope_reference(rms_norm_reference(queries, q_norm), unit.rope, offset)
    if k is None or v is None:
        return queries, None, None
    shape = (T, heads.num_kv_heads, heads.head_dim)
    keys = rms_norm_reference(mx.reshape(k, shape), k_norm)
    values = rms_norm_reference(mx.reshape(v, shape), v_norm)
    return queries, rope_reference(keys, unit.rope, offset), values


def takes(heads: HeadGeometry) -> bool:
    """Whether `head_norm_rope` has a body for this geometry."""
    return heads.head_dim % 4 == 0 and heads.head_dim <= 512


def _frequencies(rope: Rope) -> mx.array:
    """The embedding's numbers; 8 at least, as an array that a body points into has."""
    padding = mx.zeros((max(0, 8 - rope.inv_freq.size),))
    return resident(mx.concatenate([mx.array(rope.inv_freq), padding]))


def _groups(q: mx.array, tail: RowBlock, heads: HeadGeometry, has_kv: bool) -> tuple[int, int]:
    """Threadgroups that norm and rotate, and those that copy a head's rows of the old tail."""
    T, rotated = q.shape[0], heads.num_heads + 2 * heads.num_kv_heads * has_kv
    copies_a_head = -(-(tail.k.shape[1] - T) // _COPY_ROWS) if has_kv else 0
    return -(-T * rotated // _SIMDGROUPS), copies_a_head


def _template(
    q: mx.array, tail: RowBlock, unit: HeadUnit, has_kv: bool
) -> dict[str, mx.Dtype | int | bool]:
    heads = unit.heads
    head_groups, copies_a_head = _groups(q, tail, heads, has_kv)
    return {
        **rotation_template(q, unit),
        "T": q.dtype,
        "KV": tail.k.dtype,
        "M": q.shape[0],
        "D": heads.head_dim,
        "HEADS": heads.num_heads,
        "KV_HEADS": heads.num_kv_heads,
        "HAS_KV": has_kv,
        "TAIL": tail.k.shape[1],
        "SIMDGROUPS": _SIMDGROUPS,
        "HEAD_GROUPS": head_groups,
        "COPIES": 2 * heads.num_kv_heads * copies_a_head,
        "COPIES_A_HEAD": max(1, copies_a_head),
        "COPY_ROWS": _COPY_ROWS,
    }


def rotation_template(q: mx.array, unit: HeadUnit) -> dict[str, mx.Dtype | int | bool]:
    """What dialect/heads.h takes, and where heads of `q` lie."""
    D, pairs = unit.heads.head_dim, unit.rope.inv_freq.size
    norms = [0 if norm is None else 1 if norm.weight is None else 2 for norm in unit.norms]
    turns = -(-pairs // 32)
    return {
        "Q_STEP": D if q.ndim == 2 else q.shape[2],
        "Q_NORM": norms[0],
        "K_NORM": norms[1],
        "V_NORM": norms[2],
        "PAIRS": pairs,
        "TURNS": turns,
        "SIZE": 2 * turns + -(-(D - 2 * pairs) // 32),
        "IS_TRADITIONAL": unit.rope.traditional,
    }


def check(
    q: mx.array, k: mx.array | None, v: mx.array | None, rows: StepRows, unit: HeadUnit
) -> None:
    """Refuse shapes that do not fit.

    Raises:
        ShapeError: so it is.
    """
    heads, D, T = unit.heads, unit.heads.head_dim, q.shape[0]
    q_shapes = [(T, heads.num_heads * D), (T, heads.num_heads, max(D, q.shape[-1]))]
    if not 1 <= T <= MAX_ROWS or q.shape not in q_shapes:
        raise ShapeError(
            f"head_norm_rope takes 1 to {MAX_ROWS} rows of {heads.num_heads} heads of {D}, not "
            f"q {q.shape}"
        )
    kv_shape = (T, heads.num_kv_heads * D)
    if k is None or v is None:
        if k is not None or v is not None:
            raise ShapeError("head_norm_rope takes both k and v, or neither")
        return
    tail = rows.tail.k.shape
    if k.shape != kv_shape or v.shape != kv_shape or k.dtype != v.dtype:
        raise ShapeError(
            f"head_norm_rope takes k and v {kv_shape}, not {k.shape} {k.dtype} and "
            f"{v.shape} {v.dtype}"
        )
    if tail[0] != heads.num_kv_heads or tail[2] != D or tail[1] < T:
        raise ShapeError(
            f"head_norm_rope writes {T} rows of {heads.num_kv_heads} heads of {D} into a tail, "
            f"not into {tail}"
        )

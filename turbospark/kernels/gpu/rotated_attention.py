"""Norms and rotation of a decode step's heads, cache rows, attention and gate, in one launch.

A cache of several chunks takes attention_combine behind it. Every number is what `head_norm_rope`
and `attention_step` give one after the other, which serve where no body of this kind does.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu import attention_decode, head_norm_rope, trial
from turbospark.kernels.gpu import attention_geometry as geometry
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.head_norm_rope import HeadUnit
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant
from turbospark.kernels.gpu.step_rows import lengths_of
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.target import AttentionLayer

_CACHE = ("sealed_k", "sealed_v", "tail_k", "tail_v")
_LAST = ("frequencies", "lengths", "numbers", "sinks")
_COPY_ROWS = 16  # of the tail, a threadgroup
_OWN_BYTES = 16 << 10  # of a threadgroup's memory, for the step's own rows
_SHARED_BYTES = 48 << 10  # of a threadgroup of tensor cores


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """What a step's projections give; each may be columns of a wider array.

    Attributes:
        q: [T, Hq * D], or [T, Hq, n] with n >= D whose first D numbers of a head count.
        k: [T, Hkv * D], or None where another layer has written this step's rows.
        v: like k.
        gate: [T, Hq * D], [T, Hq, n] or [T, Hq]; its sigmoid multiplies the result.
    """

    q: mx.array
    k: mx.array | None = None
    v: mx.array | None = None
    gate: mx.array | None = None

    @property
    def own(self) -> list[mx.array]:
        """q, then k and v if there are any."""
        return [x for x in (self.q, self.k, self.v) if x is not None]


@dataclass(frozen=True, slots=True, eq=False)
class RotatedLayer:
    """A layer's part in it.

    Attributes:
        layer: scale, window and sinks.
        unit: norms and embedding of its heads.
        numbers: eps of each norm, the factors of cosines and sines and of scores.
        bundle: what does not change, for one argument of a launch; None for one each.
    """

    layer: AttentionLayer
    unit: HeadUnit
    numbers: mx.array
    bundle: Bundle | None

    @classmethod
    def build(cls, layer: AttentionLayer, *, bundled: bool = True) -> Self:
        """Put together what launches take."""
        q_norm, k_norm, v_norm = layer.norms
        unit = HeadUnit.build(layer.heads, layer.rope, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)
        eps = [0.0 if norm is None else norm.eps for norm in layer.norms]
        numbers = constant((*eps, layer.rope.magnitude, layer.scale))
        fixed = [*_weights(unit), unit.frequencies, numbers]
        fixed += [] if layer.sinks is None else [layer.sinks]
        return cls(layer, unit, numbers, Bundle.of((), fixed) if bundled else None)


def rotated_attention(
    inputs: HeadInputs, rows: StepRows, rotated: RotatedLayer, *, target: GpuTarget
) -> tuple[mx.array, RowBlock | None]:
    """Norm and rotate a step's heads, write its rows behind the tail's, attend to all of them.

    Args:
        inputs: of 1 to 8 rows, row i at position rows.lengths[1] + i.
        rows: what the step reads; the tail has room for T rows more.
        rotated: the layer.
        target: where.

    Returns:
        [T, Hq * D] in the dtype of `q`, and the new tail, None without k and v.

    Raises:
        ShapeError: shapes do not fit, or no body takes them: see `takes`.
    """
    q, gate, unit, sinks = inputs.q, inputs.gate, rotated.unit, rotated.layer.sinks
    heads, T, dtype, writes = unit.heads, q.shape[0], q.dtype, inputs.k is not None
    head_norm_rope.check(q, inputs.k, inputs.v, rows, unit)
    attention_decode.check_sinks(sinks, heads)
    if not takes(inputs, rows, unit, target):
        raise ShapeError(
            f"rotated_attention has no body for q {q.shape} {q.dtype} over rows "
            f"{rows.tail.k.shape} {rows.tail.k.dtype}; head_norm_rope and attention_step do"
        )
    step = attention_decode.plan(heads, T, dtype, rows, rotated.layer.window, target=target)
    copies = -(-(rows.tail.k.shape[1] - T) // (_COPY_ROWS * step.tiles)) if writes else 0
    is_whole = step.splits == 1
    given = inputs if is_whole else replace(inputs, gate=None)
    y_shape = (T, heads.num_heads * heads.head_dim) if is_whole else step.parts_shape
    y_dtype = dtype if is_whole else mx.float32
    y, *new_tail = kernel_of(step.kernel, writes=writes, gated=given.gate is not None)(
        target,
        _arrays(given, rows, rotated),
        template={
            **step.template,
            **head_norm_rope.rotation_template(q, unit),
            "T": dtype,
            "KV": rows.tail.k.dtype,
            "COPIES": copies,
            "COPY_ROWS": _COPY_ROWS,
            "OWN": 2 * T if writes else 0,
            "IS_WHOLE": is_whole,
            "HAS_SINKS": sinks is not None,
            "GATE_STEP": attention_decode.gate_step(gate, T, heads),
            "Y": y_dtype,
        },
        grid=(step.threads, heads.num_kv_heads * step.tiles, step.splits + copies),
        threadgroup=(step.threads, 1, 1),
        outputs=[
            (y_shape, y_dtype),
            *((x.shape, x.dtype) for x in (rows.tail.k, rows.tail.v) if writes),
        ],
        bundle=rotated.bundle,
    )
    if not is_whole:
        y = attention_decode.combine(y, rows, step, sinks, gate, dtype, target=target)
    return y, RowBlock(*new_tail) if writes else None


def takes(inputs: HeadInputs, rows: StepRows, unit: HeadUnit, target: GpuTarget) -> bool:
    """Whether there is a body for these arrays: sizes, types, a threadgroup's memory."""
    heads, v_norm, T = unit.heads, unit.norms[2], inputs.q.shape[0]
    own = (0 if inputs.k is None else 2 * T) * heads.head_dim * rows.tail.k.dtype.size
    others = geometry.tensor_bytes(heads, T) if target.own == "cuda" else 0
    return (
        1 <= T <= attention_decode.MAX_ROWS
        and head_norm_rope.takes(heads)
        and attention_decode.takes(heads)
        and all(x.dtype == inputs.q.dtype for x in inputs.own)
        and (v_norm is None or v_norm.weight is None)
        and own <= _OWN_BYTES
        and own + others <= _SHARED_BYTES
    )


def serves(inputs: HeadInputs, rows: StepRows, rotated: RotatedLayer, target: GpuTarget) -> bool:
    """Whether a body takes these arrays and runs here; every size is tried once."""
    unit, sinks, gate = rotated.unit, rotated.layer.sinks, inputs.gate
    if not takes(inputs, rows, unit, target):
        return False
    key = (
        target,
        unit.heads,
        tuple((x.shape, x.dtype) for x in inputs.own),
        None if gate is None else (gate.shape, gate.dtype),
        None if sinks is None else sinks.dtype,
        rotated.layer.window,
        (rows.tail.k.shape[1], rows.tail.k.dtype, rows.sealed is rows.tail),
        *head_norm_rope.rotation_template(inputs.q, unit).items(),
    )
    if key not in _verdicts:
        _verdicts[key] = _runs(inputs, rows, rotated, target)
    return _verdicts[key]


_verdicts: dict[tuple[object, ...], bool] = {}


def _runs(inputs: HeadInputs, rows: StepRows, rotated: RotatedLayer, target: GpuTarget) -> bool:
    def zeros(like: mx.array | None) -> mx.array | None:
        return None if like is None else mx.zeros(like.shape, like.dtype)

    def launch() -> Sequence[mx.array]:
        blocks = [
            RowBlock(mx.zeros(block.k.shape, block.k.dtype), mx.zeros(block.v.shape, block.v.dtype))
            for block in (rows.tail, rows.sealed)
        ]
        sealed = blocks[0] if rows.sealed is rows.tail else blocks[1]
        empty = StepRows(sealed, blocks[0], lengths_of(0, 0))
        q = mx.zeros(inputs.q.shape, inputs.q.dtype)
        given = HeadInputs(q, *map(zeros, (inputs.k, inputs.v, inputs.gate)))
        y, made = rotated_attention(given, empty, rotated, target=target)
        return [y] if made is None else [y, made.k, made.v]

    heads = rotated.unit.heads
    sizes = f"{inputs.q.shape[0]} rows of {heads.num_heads} heads of {heads.head_dim}"
    instead = "head_norm_rope and attention_decode do"
    return trial.runs("rotated_attention", sizes, launch, target, instead=instead)


def _weights(unit: HeadUnit) -> list[mx.array]:
    """Of the norms of queries and keys; what is absent is stood in for."""
    return [
        unit.frequencies if norm is None or norm.weight is None else norm.weight
        for norm in unit.norms[:2]
    ]


def _arrays(inputs: HeadInputs, rows: StepRows, rotated: RotatedLayer) -> list[mx.array]:
    """In the order of the kernel's names."""
    unit, sinks = rotated.unit, rotated.layer.sinks
    return [
        *inputs.own,
        *(rows.sealed.k, rows.sealed.v, rows.tail.k, rows.tail.v),
        *_weights(unit)[: 1 if inputs.k is None else 2],
        unit.frequencies,
        rows.lengths,
        rotated.numbers,
        rows.lengths if sinks is None else sinks,
        *([] if inputs.gate is None else [inputs.gate]),
    ]


@functools.cache
def kernel_of(plain: Kernel, *, writes: bool, gated: bool = False) -> Kernel:
    """A body of attention that rotates; it writes rows if so, and takes a gate if so."""
    own = ("query_rows", "key_rows", "value_rows") if writes else ("query_rows",)
    weights = ("q_weight", "k_weight") if writes else ("q_weight",)
    name = plain.name.replace("attention", "rotated")
    marks = ("ROTATES", *(["WRITES"] if writes else []), *(["GATED"] if gated else []))
    return replace(
        plain,
        name=name + ("" if writes else "_alone") + ("_gated" if gated else ""),
        inputs=(*own, *_CACHE, *weights, *_LAST, *(["gate"] if gated else [])),
        outputs=("y", "new_k", "new_v") if writes else ("y",),
        takes_strides=True,
        body=plain.name,
        macros=(*marks, *plain.macros),
        helpers=("heads.h", *plain.helpers),
    )

"""Rows of a block index inside a compiled step, in one launch.

The reference is `pooled_keys_reference` in kernels/block_sparse.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.block_sparse import IndexGeometry
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant, resident
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import AppendIndex
from turbospark.kernels.weights import Norm

KERNEL = Kernel(
    "index_rows",
    ("raw", "sealed_k", "tail_k", "tail_v", "weight", "frequencies", "lengths", "numbers"),
    ("new_k", "new_v"),
    takes_strides=True,
)
MAX_ROWS = 8
"""Rows of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexUnit:
    """What the rows of one layer's index are made with.

    Attributes:
        index: sizes.
        norm: of a block's mean.
        rope: of index heads.
        frequencies: the embedding's, where the device has them.
        numbers: the norm's epsilon and the embedding's magnitude, there too.
    """

    index: IndexGeometry
    norm: Norm
    rope: Rope
    frequencies: mx.array
    numbers: mx.array

    @classmethod
    def build(cls, index: IndexGeometry, norm: Norm, rope: Rope) -> "IndexUnit":
        """The unit of a layer; frequencies go to the device."""
        padding = mx.zeros((8,))
        table = resident(mx.concatenate([mx.array(rope.inv_freq), padding]))
        return cls(index, norm, rope, table, constant((norm.eps, rope.magnitude)))


def takes(index: IndexGeometry, norm: Norm, rope: Rope) -> bool:
    """Whether the body serves such an index."""
    return (
        norm.weight is not None
        and not rope.traditional
        and 0 < 2 * len(rope.inv_freq) <= index.head_dim <= 1024
    )


def index_rows(raw: mx.array, rows: StepRows, unit: IndexUnit, *, target: GpuTarget) -> RowBlock:
    """The tail of an index with T rows more.

    Args:
        raw: [T, D], at most MAX_ROWS rows at position rows.lengths[1]; may be columns of a wider
            array.
        rows: of the index, one head; the tail has room for them.
        unit: of the layer.
        target: where.

    Raises:
        ShapeError: the arrays are outside the bounds of the body.
    """
    D, tail, weight = unit.index.head_dim, rows.tail, unit.norm.weight
    fits = tail.k.shape == tail.v.shape == (1, tail.capacity, D)
    if not fits or raw.ndim != 2 or not 1 <= raw.shape[0] <= MAX_ROWS or raw.shape[1] != D:
        raise ShapeError(f"an index with a tail {tail.k.shape} takes no rows {raw.shape}")
    if weight is None or not takes(unit.index, unit.norm, unit.rope):
        raise ShapeError(f"index_rows has no body for {unit.index}")
    k, v = KERNEL(
        target,
        [
            raw,
            rows.sealed.k,
            tail.k,
            tail.v,
            weight,
            unit.frequencies,
            rows.lengths,
            unit.numbers,
        ],
        template={
            "T": tail.k.dtype,
            "D": D,
            "M": raw.shape[0],
            "R": unit.index.ratio,
            "PAIRS": len(unit.rope.inv_freq),
            "PARTS": -(-D // 32),
        },
        grid=(32 * tail.capacity, 1, 1),
        threadgroup=(32, 1, 1),
        outputs=[(tail.k.shape, tail.k.dtype), (tail.v.shape, tail.v.dtype)],
    )
    return RowBlock(k, v)


def bind_index(
    index: IndexGeometry, norm: Norm, rope: Rope, target: GpuTarget
) -> AppendIndex | None:
    """What writes a step's rows, or None where no body serves the index."""
    if not takes(index, norm, rope) or not _runs(index, len(rope.inv_freq), target):
        return None
    unit = IndexUnit.build(index, norm, rope)

    def run(raw: mx.array, cache: Any) -> bool:
        rows = cache.rows()
        if not isinstance(rows, StepRows) or raw.shape[0] > MAX_ROWS:
            return False
        cache.rebind(index_rows(raw, rows, unit, target=target), raw.shape[0])
        return True

    return run


@functools.cache
def _runs(index: IndexGeometry, pairs: int, target: GpuTarget) -> bool:
    def launch() -> list[mx.array]:
        D = index.head_dim
        rope = Rope.still(2 * pairs)
        unit = IndexUnit.build(index, Norm(mx.zeros(D), 1e-6), Rope(rope.inv_freq, D))
        block = RowBlock(mx.zeros((1, 128, D), mx.bfloat16), mx.zeros((1, 128, D), mx.bfloat16))
        rows = StepRows(block, block, mx.zeros((4,), mx.int32))
        made = index_rows(mx.zeros((1, D), mx.bfloat16), rows, unit, target=target)
        return [made.k, made.v]

    return runs("index_rows", f"{index.head_dim} values", launch, target)

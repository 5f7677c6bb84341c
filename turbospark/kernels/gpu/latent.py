"""Latent attention of a few rows on a GPU: queries, chunks of positions, values, a launch each.

The cache keeps latents and rotated keys apart; its rows are read as they lie, and the matrix of a
layer's heads as it is stored. The reference is kernels/latent.py.
"""

from dataclasses import dataclass

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu import int4_product
from turbospark.kernels.gpu.attention_geometry import Chunks
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant, resident
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.latent import LatentGeometry, LatentLayer
from turbospark.kernels.weights import QuantizedWeight

MAX_ROWS = 8
CHUNKS = Chunks(32, 96)
"""The first 96 chunks have 32 positions, the next 96 twice as many, and so on.

A threadgroup takes a chunk, and at 32 Ki positions the longest ones are about a hundredth of all.
"""
MAX_LATENT, MAX_ROPE = 512, 128

_SIMDGROUPS = 8
_COPY_ROWS = 16  # of the tail, a threadgroup
_QUERIES = 2  # of a SIMD-group
_VALUES = 4  # of a SIMD-group

Sizes = dict[str, mx.Dtype | int | bool]


@dataclass(frozen=True, slots=True, eq=False)
class LatentUnit:
    """A layer as its bodies take it.

    Attributes:
        layer: its parts; the norm has a weight.
        frequencies: of its rotary embedding.
    """

    layer: LatentLayer
    frequencies: mx.array

    @classmethod
    def build(cls, layer: LatentLayer) -> "LatentUnit":
        """Make what bodies need beside a layer's own arrays."""
        return cls(layer, resident(mx.array(layer.rope.inv_freq)))

    def matrix(self) -> tuple[list[mx.array], Sizes]:
        """Arrays of the matrix and what a body must know of their layout."""
        weight = self.layer.expand
        if not isinstance(weight, QuantizedWeight):
            plain: Sizes = {"GROUP": 8, "HAS_BIASES": False, "ZERO": 0}
            return [weight, weight, weight], plain
        offsets = weight.scales if weight.biases is None else weight.biases
        return [weight.codes, weight.scales, offsets], {
            "GROUP": weight.group_size,
            "HAS_BIASES": weight.biases is not None,
            "ZERO": weight.zero or 0,
        }

    def template(self, rows: int) -> Sizes:
        """What every body takes as template arguments."""
        sizes = self.layer.sizes
        return self.matrix()[1] | {
            "M": rows,
            "HEADS": sizes.num_heads,
            "N": sizes.key_dim,
            "L": sizes.latent_dim,
            "HEAD_ROWS": sizes.key_dim + sizes.value_dim,
            "SIMDGROUPS": _SIMDGROUPS,
        }


def takes(layer: LatentLayer) -> bool:
    """Whether there are bodies for such a layer."""
    sizes, expand = layer.sizes, layer.expand
    is_read = (
        expand.dtype in int4_product.FLOATS and expand.size >= 8
        if isinstance(expand, mx.array)
        else int4_product.takes(expand)
        and (expand.biases is None or expand.biases.dtype == expand.scales.dtype)
    )
    return (
        is_read
        and layer.norm.weight is not None
        and sizes.latent_dim % 8 == 0
        and sizes.latent_dim <= MAX_LATENT
        and sizes.rope_dim % 2 == 0
        and sizes.rope_dim <= MAX_ROPE
        and 2 * layer.rope.inv_freq.size == sizes.rope_dim
    )


def latent_queries(
    q: mx.array, row: mx.array, rows: StepRows, unit: LatentUnit, *, target: GpuTarget
) -> tuple[mx.array, RowBlock]:
    """Make queries that score latents, and write a step's rows behind those of the tail.

    Args:
        q: [T, H * (N + R)], not rotated; 1 to 8 rows, row i at position rows.lengths[1] + i.
        row: [T, L + R], latents before their norm and keys before their rotation.
        rows: the tail has room for T rows more; `sealed` is not looked at.
        unit: the layer.
        target: where.

    Returns:
        Queries [T, H, L + R] float32, times the scores' factor, and the new tail.

    Raises:
        ShapeError: shapes do not fit.
    """
    layer, tail, T = unit.layer, rows.tail, q.shape[0]
    sizes = layer.sizes
    L, R, H = sizes.latent_dim, sizes.rope_dim, sizes.num_heads
    _check(q, row, tail, sizes)
    arrays, _ = unit.matrix()
    slices, room = -(-L // 256), tail.k.shape[1]
    groups, threads = H * slices + 1 + -(-(room - T) // _COPY_ROWS), 32 * _SIMDGROUPS
    weight = layer.norm.weight
    assert weight is not None
    y, new_k, new_v = _kernel("latent_queries", unit)(
        target,
        [
            *(q, row, weight, *arrays, tail.k, tail.v),
            *(rows.lengths, unit.frequencies),
            constant((layer.norm.eps, layer.rope.magnitude, layer.scale)),
        ],
        template=unit.template(T)
        | {
            "KV": tail.k.dtype,
            "R": R,
            "SLICES": slices,
            "COPY_ROWS": _COPY_ROWS,
            "IS_TRADITIONAL": layer.rope.traditional,
        },
        grid=(groups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=[
            ((T, H, L + R), mx.float32),
            (tail.k.shape, tail.k.dtype),
            (tail.v.shape, tail.v.dtype),
        ],
    )
    return y, RowBlock(new_k, new_v)


def latent_step(
    q: mx.array, rows: StepRows, unit: LatentUnit, dtype: mx.Dtype, *, target: GpuTarget
) -> mx.array:
    """Attend from `latent_queries`, whose own rows are in `rows`, and read the values.

    Args:
        q: [T, H, L + R] float32.
        rows: what the step reads.
        unit: the layer.
        dtype: of the result.
        target: where.

    Returns:
        [T, H * V].
    """
    sizes, T = unit.layer.sizes, q.shape[0]
    L, R, H, V = sizes.latent_dim, sizes.rope_dim, sizes.num_heads, sizes.value_dim
    tail = rows.tail.k.shape[1]
    capacity = tail if rows.sealed is rows.tail else rows.sealed.k.shape[1] + tail
    splits, threads = CHUNKS.count(capacity, T, None), 32 * _SIMDGROUPS
    cut = CHUNKS.template
    tiles = -(-T * H // (_QUERIES * _SIMDGROUPS))
    (parts,) = PARTIALS(
        target,
        [q, rows.sealed.k, rows.sealed.v, rows.tail.k, rows.tail.v, rows.lengths],
        template=cut
        | {
            "M": T,
            "HEADS": H,
            "L": L,
            "R": R,
            "KV": rows.tail.k.dtype,
            "QUADS": -(-L // 128),
            "PAIRS": -(-R // 64),
            "QUERIES": _QUERIES,
            "BATCH": 8 // _QUERIES,
            "SIMDGROUPS": _SIMDGROUPS,
        },
        grid=(threads, tiles, splits),
        threadgroup=(threads, 1, 1),
        outputs=[((splits, T, H, L + 4), mx.float32)],
    )
    arrays, _ = unit.matrix()
    (y,) = _kernel("latent_values", unit)(
        target,
        [parts, *arrays, rows.lengths],
        template=unit.template(T)
        | cut
        | {"V": V, "T": dtype, "GROUPS": 4 * threads // L, "ROWS": _VALUES},
        grid=(threads, T * H, -(-V // (_SIMDGROUPS * _VALUES))),
        threadgroup=(threads, 1, 1),
        outputs=[((T, H * V), dtype)],
    )
    return y


def _kernel(name: str, unit: LatentUnit) -> Kernel:
    return KERNELS[name, isinstance(unit.layer.expand, QuantizedWeight)]


def _built(name: str, coded: bool) -> Kernel:
    inputs, outputs = _NAMES[name]
    kind = "" if coded else "_dense"
    return Kernel(
        f"{name}{kind}",
        inputs,
        outputs,
        body=name,
        macros=(f"CODED {int(coded)}",),
        helpers=("latent.h",),
    )


_MATRIX = ("codes", "scales", "biases")
_NAMES = {
    "latent_queries": (
        (
            *("q", "row", "norm_weight", *_MATRIX, "tail_k", "tail_v"),
            *("lengths", "frequencies", "numbers"),
        ),
        ("y", "new_k", "new_v"),
    ),
    "latent_values": (("parts", *_MATRIX, "lengths"), ("y",)),
}
KERNELS = {(name, coded): _built(name, coded) for name in _NAMES for coded in (True, False)}
PARTIALS = Kernel(
    "latent_partials", ("q", "sealed_k", "sealed_v", "tail_k", "tail_v", "lengths"), ("y",)
)


def _check(q: mx.array, row: mx.array, tail: RowBlock, sizes: LatentGeometry) -> None:
    T = q.shape[0]
    wanted = (T, sizes.num_heads * sizes.query_dim), (T, sizes.row_dim)
    if not 1 <= T <= MAX_ROWS or (q.shape, row.shape) != wanted or q.dtype != row.dtype:
        raise ShapeError(
            f"latent_queries takes 1 to {MAX_ROWS} rows q {wanted[0]} and row {wanted[1]} of one "
            f"type, not {q.shape} {q.dtype} and {row.shape} {row.dtype}"
        )
    room = tail.k.shape[1]
    if (tail.k.shape, tail.v.shape) != ((1, room, sizes.rope_dim), (1, room, sizes.latent_dim)):
        raise ShapeError(
            f"latent_queries writes rows of {sizes.rope_dim} and {sizes.latent_dim} numbers into "
            f"a tail, not into {tail.k.shape} and {tail.v.shape}"
        )
    if room < T:
        raise ShapeError(f"latent_queries writes {T} rows into a tail, not into {tail.k.shape}")

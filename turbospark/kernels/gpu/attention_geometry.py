"""How decode attention is cut into chunks, threadgroups and lanes, for a model's sizes."""

from dataclasses import dataclass

import mlx.core as mx

from turbospark.kernels.target import HeadGeometry

SIMDGROUPS = 4
COMBINE_THREADS = 256

_LIVE_VALUES = 32  # of a query's and of its sum's in a lane, for all queries together
_QUERIES = 8  # of a SIMD-group
_FIRST_KEYS = 128  # at least, of the first chunk: a text as long as a tail needs no second pass
TENSOR_SHAPES = {  # head dimension: columns of a warp, warps, tiles of 8 keys a warp
    32: (32, 4, 4),
    64: (32, 4, 4),
    96: (32, 6, 2),
    128: (64, 4, 2),
    192: (64, 6, 2),
    256: (64, 8, 1),
    384: (64, 6, 1),
    512: (64, 8, 1),
}


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of keys, cut at absolute positions: see dialect/common.h.

    Attributes:
        size: keys of the first chunks.
        first: how many have that size before it doubles, and so on; 0 if it never does.
        doublings: at most; 24 are more than any text needs.
    """

    size: int
    first: int
    doublings: int = 24

    @property
    def template(self) -> dict[str, int]:
        """What bodies are told."""
        return {"CHUNK": self.size, "FIRST": self.first, "DOUBLINGS": self.doublings}

    def of(self, position: int) -> int:
        """The number of the chunk that holds a position."""
        unit = position // self.size
        if self.first == 0:
            return unit
        level = min((unit // self.first + 1).bit_length() - 1, self.doublings)
        return level * self.first + ((unit - ((1 << level) - 1) * self.first) >> level)

    def count(self, capacity: int, rows: int, window: int | None) -> int:
        """Chunks that `rows` queries may need over a cache of that capacity, wherever they are."""
        if window is None:
            return self.of(capacity - 1) + 1
        return (min(window - 1 + rows, capacity) + self.size - 2) // self.size + 1


@dataclass(frozen=True, slots=True)
class VectorShape:
    """Of attention_partials: queries a SIMD-group, lanes a key, four values each so many times."""

    queries: int
    lanes: int
    quads: int


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Of attention_tensor: columns a warp, warps, tiles of 8 keys a warp, of 16 queries a group."""

    dims: int
    warps: int
    key_tiles: int
    query_tiles: int


def has_vector_shape(head_dim: int) -> bool:
    """Whether attention_partials takes heads of this size."""
    return head_dim % 8 == 0 and 8 <= head_dim <= 512 and _lanes(head_dim)[1] * 4 <= _LIVE_VALUES


def has_tensor_shape(head_dim: int, q: mx.Dtype, keys: mx.Dtype) -> bool:
    """Whether attention_tensor takes heads of this size and type."""
    return head_dim in TENSOR_SHAPES and q == keys and q in (mx.float16, mx.bfloat16)


def vector_shape(heads: HeadGeometry, rows: int) -> VectorShape:
    """Lanes and queries of a SIMD-group: registers bound both."""
    lanes, quads = _lanes(heads.head_dim)
    share = heads.num_heads // heads.num_kv_heads
    queries = min(rows * share, _QUERIES, _LIVE_VALUES // (4 * quads))
    return VectorShape(queries, lanes, quads)


def tensor_shape(heads: HeadGeometry, rows: int) -> TensorShape:
    """One or two tiles of queries share what is read."""
    queries = rows * heads.num_heads // heads.num_kv_heads
    return TensorShape(*TENSOR_SHAPES[heads.head_dim], query_tiles=1 if queries <= 16 else 2)


def loads_ahead(heads: HeadGeometry, rows: int) -> bool:
    """Whether a step of attention_tensor asks for the next one's keys and values.

    That takes registers for both at once; it does where as many threadgroups have room with them.
    """
    if tensor_shape(heads, rows).query_tiles == 2:
        return heads.head_dim <= 256
    return heads.head_dim == 512


def resident_blocks(heads: HeadGeometry, rows: int) -> int:
    """Threadgroups of attention_tensor that a multiprocessor is to hold; 0 for any number.

    Norms and rotation in front of it would take more registers than it does itself.
    """
    is_one = tensor_shape(heads, rows).query_tiles == 1
    return {64: 4, 128: 4, 256: 2}.get(heads.head_dim, 0) if is_one else 0


def tensor_bytes(heads: HeadGeometry, rows: int) -> int:
    """Memory of a threadgroup of attention_tensor; 0 where it takes no such heads."""
    if heads.head_dim not in TENSOR_SHAPES:
        return 0
    shape, D = tensor_shape(heads, rows), heads.head_dim
    queries, keys = 16 * shape.query_tiles, 8 * shape.warps * shape.key_tiles
    joined = 4 * queries * D if shape.warps * shape.dims > D else 0
    return max(queries * (2 * D + 4 * keys), joined) + 4 * queries * (shape.warps + 2)


def chunks(heads: HeadGeometry, window: int | None, *, tensor: bool) -> Chunks:
    """How keys are cut: by sizes of the model alone, never by the number of queries.

    Tensor cores want a long text in few chunks that are alike, four times as long as the first: of
    512 keys for most heads, 768 for those of 96 and 192 columns. Short texts want many.
    """
    if not tensor:
        first = max(16, 256 // heads.num_kv_heads)
        return Chunks(32 * SIMDGROUPS, 0 if window is not None else first)
    _, warps, key_tiles = TENSOR_SHAPES[heads.head_dim]
    keys = 8 * warps * key_tiles
    size = -(-_FIRST_KEYS // keys) * keys
    return Chunks(size, 0, 0) if window is not None else Chunks(size, 16, 2)


def combine_lanes(head_dim: int) -> int:
    """Lanes of four columns each in a threadgroup of attention_combine; a power of two."""
    return min(head_dim & -head_dim, 64) // 4


def _lanes(head_dim: int) -> tuple[int, int]:
    quads = head_dim // 4
    lanes = min(quads & -quads, 32)
    if lanes > 16 and quads // lanes < 2:
        lanes = 16
    return lanes, quads // lanes

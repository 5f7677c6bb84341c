"""Latent attention: all heads read one row a position and hold matrices of their own to read it.

A head's keys and values are products of its matrices with the row's latent. A query that has gone
through the key matrix scores the latents as they are, and the values' matrix is applied to their
weighted sum: so the rows are never expanded.
"""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from turbospark.kernels.attention import attend_reference, attend_step_reference
from turbospark.kernels.kv_rows import KVRows, RowBlock, RowStore, StepRows
from turbospark.kernels.quantized_matmul import heads_matmul_reference
from turbospark.kernels.rope import Rope
from turbospark.kernels.weights import Norm, Weight


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """Sizes of one latent attention layer.

    Attributes:
        num_heads: query heads, H.
        latent_dim: numbers of a row that keys and values are made of, L.
        rope_dim: numbers of a row that rotate and serve as a key as they are, R.
        key_dim: numbers of a head's key made of the latent, N.
        value_dim: numbers of a head's value, V.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    key_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Numbers of a query head."""
        return self.key_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Numbers that one position takes in the cache."""
        return self.latent_dim + self.rope_dim

    @property
    def expanded(self) -> int:
        """Rows of the matrix of all heads: of each its keys', then its values'."""
        return self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, eq=False)
class LatentLayer:
    """What a layer's latent attention is made of.

    Attributes:
        sizes: of the layer.
        rope: of a head's rotated part and of the keys that heads share.
        norm: of the latents.
        expand: [H * (N + V), L], of each head the keys' rows, then the values'.
        scale: factor of the scores.
    """

    sizes: LatentGeometry
    rope: Rope
    norm: Norm
    expand: Weight
    scale: float


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """A latent cache as other attention sees it: latents and rotated keys side by side.

    They serve as keys and as values; of a sum of values only the latents are wanted.

    Attributes:
        store: the cache.
    """

    store: RowStore

    def rows(self) -> KVRows | StepRows:
        """The rows as they are now, [1, n, L + R]."""
        rows = cast("KVRows | StepRows", self.store.rows())
        if isinstance(rows, StepRows):
            sealed = _joined(rows.sealed)
            tail = sealed if rows.tail is rows.sealed else _joined(rows.tail)
            return StepRows(sealed, tail, rows.lengths)
        return rows._replace(
            sealed=None if rows.sealed is None else _joined(rows.sealed),
            tail=None if rows.tail is None else _joined(rows.tail),
        )


def attend_joined_reference(q: mx.array, cache: JoinedRows, scale: float) -> mx.array:
    """Attention of q [T, H, L + R] over joined rows: [T, H * (L + R)]."""
    rows = cache.rows()
    if isinstance(rows, StepRows):
        return attend_step_reference(q, rows, scale)
    return attend_reference(q, rows, scale)


def absorbed_queries(q: mx.array, keys: Weight) -> mx.array:
    """Queries that score latents: q [T, H, N + R] through keys [H, N, L] -> [T, H, L + R]."""
    N = keys.shape[1]
    latent = heads_matmul_reference(q[..., :N], keys, transpose=False).astype(q.dtype)
    return mx.concatenate([latent, q[..., N:]], axis=-1)


def read_values(sums: mx.array, values: Weight) -> mx.array:
    """Sums of joined rows [T, H * (L + R)] through values [H, V, L] -> [T, H * V]."""
    T, (H, _, L) = sums.shape[0], values.shape
    latents = mx.reshape(sums, (T, H, -1))[..., :L]
    read = heads_matmul_reference(latents, values, transpose=True)
    return mx.reshape(read, (T, -1)).astype(sums.dtype)


def _joined(block: RowBlock) -> RowBlock:
    rows = mx.concatenate([block.v, block.k], axis=-1)
    return RowBlock(rows, rows)

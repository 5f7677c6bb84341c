"""Latent attention: all heads read one row a position and hold matrices of their own to read it.

A head's keys and values are products of its matrices with the row's latent. A query that has gone
through the key matrix scores the latents as they are, and the values' matrix is applied to their
weighted sum: so the rows are never expanded.
"""

from dataclasses import dataclass

import mlx.core as mx

from turbospark.kernels.attention import attend_reference, attend_step_reference
from turbospark.kernels.kv_rows import KVRows, RowBlock, StepRows
from turbospark.kernels.quantized_matmul import heads_matmul_reference
from turbospark.kernels.weights import Weight


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


def attend_latent_reference(
    q: mx.array, rows: KVRows | StepRows, keys: Weight, values: Weight, scale: float
) -> mx.array:
    """softmax((k q) . c scale) (v c) of every head, where c are the cached latents.

    A row's result does not depend on its neighbours, bit for bit on a CPU.

    Args:
        q: [T, H, N + R], the last R numbers of a head rotated.
        rows: the cache's rotated keys [1, n, R] as `k` and latents [1, n, L] as `v`.
        keys: [H, N, L].
        values: [H, V, L].
        scale: factor of the scores.

    Returns:
        [T, H * V] in the dtype of `q`.
    """
    T, H, N = q.shape[0], q.shape[1], keys.shape[1]
    absorbed = heads_matmul_reference(q[..., :N], keys, transpose=False).astype(q.dtype)
    queries = mx.concatenate([absorbed, q[..., N:]], axis=-1)  # [T, H, L + R]
    if isinstance(rows, StepRows):
        tail = _joined(rows.tail)
        sealed = tail if rows.sealed is rows.tail else _joined(rows.sealed)
        out = attend_step_reference(queries, StepRows(sealed, tail, rows.lengths), scale)
    else:
        sealed = None if rows.sealed is None else _joined(rows.sealed)
        tail = None if rows.tail is None else _joined(rows.tail)
        joined = rows._replace(sealed=sealed, tail=tail)
        out = attend_reference(queries, joined, scale)  # [T, H * L]
    read = heads_matmul_reference(mx.reshape(out, (T, H, -1)), values, transpose=True)
    return mx.reshape(read, (T, -1)).astype(q.dtype)


def _joined(block: RowBlock) -> RowBlock:
    """Latents and rotated keys side by side as keys, the latents as values."""
    return RowBlock(mx.concatenate([block.v, block.k], axis=-1), block.v)

"""The unit of latent attention on a GPU: bodies for a few rows, MLX's own operations for many."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from turbospark.kernels.gpu.attention_prefill import attention_prefill, positions
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.latent import MAX_ROWS, LatentUnit, latent_queries, latent_step
from turbospark.kernels.gpu.step_rows import lengths_of, step_of
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.kv_rows import KVRows, RowBlock, RowStore, StepRows
from turbospark.kernels.latent import LatentGeometry, LatentLayer
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import rope_reference
from turbospark.kernels.target import AttendLatents
from turbospark.protocols import Phase

Expand = Callable[[mx.array, Phase], mx.array]
"""[n, L] -> [n, H * (N + V)]."""


def bind_latents(unit: LatentUnit, expand: Expand, target: GpuTarget) -> AttendLatents | None:
    """Latent attention of one layer: bodies for a few rows, MLX's own operations for many.

    Args:
        unit: the layer.
        expand: multiplies rows with its matrix.
        target: where.

    Returns:
        None where the bodies cannot run.
    """
    if not _can_run(unit, target):
        return None

    def run(q: mx.array, row: mx.array, cache: Any, phase: Phase) -> mx.array | None:
        T = q.shape[0]
        rows = cache.rows()
        if phase is not Phase.DECODE or T > MAX_ROWS:
            is_step = isinstance(rows, StepRows)
            return None if is_step else latent_prefill(q, row, cache, unit.layer, expand)
        if isinstance(rows, StepRows):
            queries, tail = latent_queries(q, row, rows, unit, target=target)
            cache.rebind(tail, T)
            return latent_step(queries, cache.rows(), unit, q.dtype, target=target)
        offset = cache.offset
        block = _unread(unit.layer.sizes, MAX_ROWS, q.dtype)
        own = StepRows(block, block, lengths_of(offset, offset))
        queries, tail = latent_queries(q, row, own, unit, target=target)
        cache.append(tail.k[:, :T].swapaxes(0, 1), tail.v[:, :T].swapaxes(0, 1))
        return latent_step(queries, step_of(cache.rows(), offset), unit, q.dtype, target=target)

    return run


def latent_prefill(
    q: mx.array, row: mx.array, cache: RowStore, layer: LatentLayer, expand: Expand
) -> mx.array:
    """Norm, rotate and append a pass's rows; attend with every head's keys and values expanded.

    Many queries share what is expanded, and a head's own keys are narrower than latents.
    """
    sizes, offset = layer.sizes, cache.offset
    T, H, L, N = q.shape[0], sizes.num_heads, sizes.latent_dim, sizes.key_dim
    latent = rms_norm_reference(row[:, :L], layer.norm)
    key = rope_reference(row[:, None, L:], layer.rope, offset)  # [T, 1, R]
    q = mx.reshape(q, (T, H, -1))
    turned = rope_reference(q[..., N:], layer.rope, offset)
    cache.append(key, latent[:, None])
    rows = cache.rows()
    keys, latents = (positions(rows, name, 0)[0].astype(q.dtype) for name in ("k", "v"))
    heads = mx.reshape(expand(latents, Phase.PREFILL), (len(keys), H, -1))  # [n, H, N + V]
    shared = mx.broadcast_to(keys[:, None], (len(keys), H, sizes.rope_dim))
    block = RowBlock(
        mx.concatenate([heads[..., :N], shared], axis=-1).swapaxes(0, 1),
        heads[..., N:].swapaxes(0, 1),
    )
    everything = KVRows(None, block, 0, 0, rows.end)
    queries = mx.concatenate([q[..., :N], turned], axis=-1)
    return attention_prefill(queries, everything, layer.scale)


def _unread(sizes: LatentGeometry, count: int, dtype: mx.Dtype) -> RowBlock:
    """A tail without rows, with room for `count`."""
    dims = (sizes.rope_dim, sizes.latent_dim)
    k, v = (mx.zeros((1, count, dim), dtype) for dim in dims)
    return RowBlock(k, v)


def _can_run(unit: LatentUnit, target: GpuTarget) -> bool:
    sizes, expand = unit.layer.sizes, unit.layer.expand
    dtype = expand.dtype if isinstance(expand, mx.array) else expand.scales.dtype

    def launch() -> mx.array:
        q = mx.zeros((1, sizes.num_heads * sizes.query_dim), dtype)
        block = _unread(sizes, 128, dtype)
        rows = StepRows(block, block, lengths_of(0, 0))
        queries, tail = latent_queries(
            q, mx.zeros((1, sizes.row_dim), dtype), rows, unit, target=target
        )
        return latent_step(queries, StepRows(tail, tail, rows.lengths), unit, dtype, target=target)

    text = f"{sizes.num_heads} heads over latents of {sizes.latent_dim} numbers"
    return runs("latent attention", text, launch, target)

"""The attention units of a GPU: which body or operation serves a call, and what the cache takes."""

import functools
from typing import Any

import mlx.core as mx

from turbospark.kernels.attention import attend_step_reference
from turbospark.kernels.gpu import attention_decode, head_norm_rope
from turbospark.kernels.gpu.attention_prefill import attention_prefill
from turbospark.kernels.gpu.head_norm_rope import HeadUnit
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.target import Attend, HeadGeometry, Rotate
from turbospark.protocols import Phase


def bind_heads(unit: HeadUnit, target: GpuTarget) -> Rotate:
    """Norms and rotation of a layer's heads; the body in decode, MLX's operations in prefill."""

    def run(
        q: mx.array, k: mx.array | None, v: mx.array | None, cache: Any, phase: Phase
    ) -> mx.array:
        T = q.shape[0]
        offset = cache.offset if k is not None else cache.offset - T
        if phase is not Phase.DECODE or T > head_norm_rope.MAX_ROWS:
            y, keys, values = head_norm_rope.head_norm_rope_reference(q, k, v, offset, unit)
            if keys is not None and values is not None:
                cache.append(keys, values)
            return y
        rows = cache.rows()
        in_step = isinstance(rows, StepRows)
        if not in_step:
            block = _unread(unit.heads, T, q.dtype if k is None else k.dtype)
            rows = StepRows(block, block, attention_decode.lengths_of(offset, offset))
        y, tail = head_norm_rope.head_norm_rope(q, k, v, rows, unit, target=target)
        if tail is not None and in_step:
            cache.rebind(tail, T)
        elif tail is not None:
            cache.append(tail.k.swapaxes(0, 1), tail.v.swapaxes(0, 1))
        return y

    return run


def bind_attention(
    heads: HeadGeometry,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    target: GpuTarget | None,
) -> Attend:
    """Attention over a cache; `target` is None where the body is switched off."""
    from_target = target if attention_decode.takes(heads) else None

    def run(q: mx.array, cache: Any, phase: Phase) -> mx.array:
        rows = cache.rows()
        if isinstance(rows, StepRows):
            return _attend_step(q, rows, scale, window, sinks, from_target)
        if from_target and phase is Phase.DECODE and q.shape[0] <= attention_decode.MAX_ROWS:
            return attention_decode.attention_decode(
                q, rows, scale, window, sinks, target=from_target
            )
        return attention_prefill(q, rows, scale, window, sinks)

    return run


def _attend_step(
    q: mx.array,
    rows: StepRows,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    target: GpuTarget | None,
) -> mx.array:
    if target is None:
        return attend_step_reference(q, rows, scale, window, sinks)
    parts: list[mx.array] = []
    for first in range(0, q.shape[0], attention_decode.MAX_ROWS):
        at = rows.lengths if first == 0 else rows.lengths + mx.array([0, first], mx.int32)
        part = q[first : first + attention_decode.MAX_ROWS]
        step = rows._replace(lengths=at)
        parts.append(
            attention_decode.attention_step(part, step, scale, window, sinks, target=target)
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


@functools.lru_cache(maxsize=32)
def _unread(heads: HeadGeometry, count: int, dtype: mx.Dtype) -> RowBlock:
    """A tail without rows, with room for `count`."""
    zeros = mx.zeros((heads.num_kv_heads, count, heads.head_dim), dtype)
    return RowBlock(zeros, zeros)

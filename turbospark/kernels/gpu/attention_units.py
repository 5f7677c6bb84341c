"""The attention units of a GPU: which body or operation serves a call, and what the cache takes."""

import functools
from typing import Any

import mlx.core as mx

from turbospark.kernels.attention import attend_step_reference, gated_reference
from turbospark.kernels.gpu import attention_decode, head_norm_rope
from turbospark.kernels.gpu.attention_prefill import attention_prefill
from turbospark.kernels.gpu.head_norm_rope import HeadUnit
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rotated_attention import (
    HeadInputs,
    RotatedLayer,
    rotated_attention,
    serves,
)
from turbospark.kernels.gpu.step_rows import lengths_of
from turbospark.kernels.kv_rows import KVRows, RowBlock, StepRows
from turbospark.kernels.target import Attend, AttentionLayer, HeadGeometry, Rotate, RotateAttend
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
            rows = StepRows(block, block, lengths_of(offset, offset))
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

    layer = AttentionLayer(heads, None, (None, None, None), scale, window, sinks)

    def run(q: mx.array, cache: Any, phase: Phase) -> mx.array:
        return _attend(q, cache.rows(), layer, None, phase, from_target)

    return run


def bind_rotated(layer: AttentionLayer, target: GpuTarget) -> RotateAttend | None:
    """Norms, rotation, attention and gate of a layer, in one launch or two where a body serves.

    Where none does, and in prefill, it is one unit after the other; None for heads without bodies.
    """
    if not (head_norm_rope.takes(layer.heads) and attention_decode.takes(layer.heads)):
        return None
    rotated = RotatedLayer.build(layer)
    rotate = bind_heads(rotated.unit, target)

    def run(
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        gate: mx.array | None,
        cache: Any,
        phase: Phase,
    ) -> mx.array:
        rows = cache.rows()
        if phase is Phase.DECODE and isinstance(rows, StepRows):
            inputs = HeadInputs(q, k, v, gate)
            if serves(inputs, rows, rotated, target):
                y, tail = rotated_attention(inputs, rows, rotated, target=target)
                if tail is not None:
                    cache.rebind(tail, q.shape[0])
                return y
        heads = rotate(q, k, v, cache, phase)
        return _attend(heads, cache.rows(), layer, gate, phase, target)

    return run


def _attend(
    q: mx.array,
    rows: KVRows | StepRows,
    layer: AttentionLayer,
    gate: mx.array | None,
    phase: Phase,
    target: GpuTarget | None,
) -> mx.array:
    """Attention and gate; `target` is None where no body serves."""
    scale, window, sinks = layer.scale, layer.window, layer.sinks
    few = phase is Phase.DECODE and q.shape[0] <= attention_decode.MAX_ROWS
    if isinstance(rows, StepRows) and target is not None:
        return _attend_step(q, rows, layer, gate, target)
    if isinstance(rows, StepRows):
        y = attend_step_reference(q, rows, scale, window, sinks)
    elif target is not None and few:
        return attention_decode.attention_decode(q, rows, scale, window, sinks, gate, target=target)
    else:
        y = attention_prefill(q, rows, scale, window, sinks)
    return y if gate is None else gated_reference(y, gate)


def _attend_step(
    q: mx.array,
    rows: StepRows,
    layer: AttentionLayer,
    gate: mx.array | None,
    target: GpuTarget,
) -> mx.array:
    parts: list[mx.array] = []
    for first in range(0, q.shape[0], attention_decode.MAX_ROWS):
        at = rows.lengths if first == 0 else rows.lengths + mx.array([0, first], mx.int32)
        last = first + attention_decode.MAX_ROWS
        y = attention_decode.attention_step(
            q[first:last],
            rows._replace(lengths=at),
            layer.scale,
            layer.window,
            layer.sinks,
            None if gate is None else gate[first:last],
            target=target,
        )
        parts.append(y)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


@functools.lru_cache(maxsize=32)
def _unread(heads: HeadGeometry, count: int, dtype: mx.Dtype) -> RowBlock:
    """A tail without rows, with room for `count`."""
    zeros = mx.zeros((heads.num_kv_heads, count, heads.head_dim), dtype)
    return RowBlock(zeros, zeros)

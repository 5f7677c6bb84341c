"""Fusion units of attention: rotated queries and cache rows, then attention over the cache."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels import target
from turbospark.kernels.attention import (
    attend_reference,
    attend_step_reference,
    gated_reference,
)
from turbospark.kernels.kv_rows import RowStore, StepRows
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import Rope, rope_reference
from turbospark.kernels.target import AttentionLayer, HeadGeometry, KernelSet
from turbospark.kernels.weights import Norm
from turbospark.nn.linear import RMSNorm, norm_of
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase


class HeadNormRope(Unit):
    """Per-head norms and RoPE; the rows of k and v go into the cache."""

    def __init__(
        self,
        heads: HeadGeometry,
        rope: Rope,
        *,
        q_norm: RMSNorm | Norm | None = None,
        k_norm: RMSNorm | Norm | None = None,
        v_norm: Norm | None = None,
    ) -> None:
        self._heads, self._rope = heads, rope
        self._q_norm, self._k_norm, self._v_norm = q_norm, k_norm, v_norm
        self._run: target.Rotate | None = None

    def bind(self, kernels: KernelSet) -> None:
        norms = (norm_of(self._q_norm), norm_of(self._k_norm), self._v_norm)
        self._run = kernels.head_norm_rope(self._heads, *norms, self._rope)
        self.body = kernels.name if self._run else Unit.body

    def __call__(
        self,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        cache: RowStore,
        phase: Phase,
    ) -> mx.array:
        """Rotate a step's queries and append its rows to the cache.

        Args:
            q: [T, Hq * D].
            k: [T, Hkv * D], or None where another layer has written this step's rows.
            v: like k.
            cache: advanced by T, unless k and v are None: then it stands behind these rows.
            phase: prefill or decode.

        Returns:
            Rotated queries [T, Hq, D].
        """
        run = self._run or self.reference
        return run(q, k, v, cache, phase)

    def reference(
        self,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        cache: RowStore,
        phase: Phase,
    ) -> mx.array:
        T, D = q.shape[0], self._heads.head_dim
        offset = cache.offset
        if k is None or v is None:
            offset -= T
        else:
            kv_shape = (T, self._heads.num_kv_heads, D)
            rows = rms_norm_reference(mx.reshape(k, kv_shape), norm_of(self._k_norm))
            values = rms_norm_reference(mx.reshape(v, kv_shape), self._v_norm)
            cache.append(rope_reference(rows, self._rope, offset), values)
        heads = rms_norm_reference(mx.reshape(q, (T, -1, D)), norm_of(self._q_norm))
        return rope_reference(heads, self._rope, offset)  # [T, Hq, D]


class Sinks(nn.Module):
    """One score a query head that joins the head's softmax and adds no value."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = mx.zeros((num_heads,))


class Attend(Unit):
    """Causal attention over a cache that already holds the queries' own rows.

    Args:
        heads: of the layer.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: of the layer's heads, where a family has them.
    """

    def __init__(
        self,
        heads: HeadGeometry,
        *,
        scale: float,
        window: int | None = None,
        sinks: Sinks | None = None,
    ) -> None:
        self._heads, self._scale, self._window, self._sinks = heads, scale, window, sinks
        self._run: target.Attend | None = None

    def bind(self, kernels: KernelSet) -> None:
        sinks = None if self._sinks is None else self._sinks.weight
        self._run = kernels.attend(self._heads, self._scale, self._window, sinks)
        self.body = kernels.name if self._run else Unit.body

    def __call__(self, q: mx.array, cache: RowStore, phase: Phase) -> mx.array:
        """Attend from q [T, Hq, D] to the cache's rows: [T, Hq * D]."""
        run = self._run or self.reference
        return run(q, cache, phase)

    def reference(self, q: mx.array, cache: RowStore, phase: Phase) -> mx.array:
        rows = cache.rows()
        attend = attend_step_reference if isinstance(rows, StepRows) else attend_reference
        sinks = None if self._sinks is None else self._sinks.weight
        return attend(q, cast(Any, rows), self._scale, self._window, sinks)


class RotatedAttention(Unit):
    """Per-head norms and RoPE, rows of k and v into the cache, then attention over it.

    Where the target has no body for the whole, it is `rotate`, then attention, then the gate.

    Args:
        heads: of the layer.
        rope: of its heads.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: of the layer's heads, where a family has them.
        q_norm: of queries.
        k_norm: of keys.
        v_norm: of values.
    """

    def __init__(
        self,
        heads: HeadGeometry,
        rope: Rope,
        *,
        scale: float,
        window: int | None = None,
        sinks: Sinks | None = None,
        q_norm: RMSNorm | Norm | None = None,
        k_norm: RMSNorm | Norm | None = None,
        v_norm: Norm | None = None,
    ) -> None:
        self.rotate = HeadNormRope(heads, rope, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)
        """The first half, for who wants the rows alone."""
        self.attend = Attend(heads, scale=scale, window=window, sinks=sinks)
        """The second half."""
        self._heads, self._rope, self._norms = heads, rope, (q_norm, k_norm, v_norm)
        self._scale, self._window, self._sinks = scale, window, sinks
        self._run: target.RotateAttend | None = None

    def bind(self, kernels: KernelSet) -> None:
        self.rotate.bind(kernels)
        self.attend.bind(kernels)
        q_norm, k_norm, v_norm = map(norm_of, self._norms)
        sinks = None if self._sinks is None else self._sinks.weight
        layer = AttentionLayer(
            self._heads, self._rope, (q_norm, k_norm, v_norm), self._scale, self._window, sinks
        )
        self._run = kernels.rotated_attention(layer)
        self.body = kernels.name if self._run else self.attend.body

    def __call__(
        self,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        cache: RowStore,
        phase: Phase,
        gate: mx.array | None = None,
    ) -> mx.array:
        """Append a step's rows to the cache and attend from its queries.

        Args:
            q: [T, Hq * D].
            k: [T, Hkv * D], or None where another layer has written this step's rows.
            v: like k.
            cache: advanced by T, unless k and v are None: then it stands behind these rows.
            phase: prefill or decode.
            gate: [T, Hq * D], or [T, Hq] with one number a head, whose sigmoid multiplies the
                result; None for none.

        Returns:
            [T, Hq * D].
        """
        if self._run is not None:
            return self._run(q, k, v, gate, cache, phase)
        attended = self.attend(self.rotate(q, k, v, cache, phase), cache, phase)
        return attended if gate is None else gated_reference(attended, gate)

    def reference(
        self,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        cache: RowStore,
        phase: Phase,
        gate: mx.array | None = None,
    ) -> mx.array:
        heads = self.rotate.reference(q, k, v, cache, phase)
        attended = self.attend.reference(heads, cache, phase)
        return attended if gate is None else gated_reference(attended, gate)

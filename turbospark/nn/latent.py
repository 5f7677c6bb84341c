"""The fusion unit of latent attention: one cached row a position serves all heads."""

from dataclasses import replace

import mlx.core as mx

from turbospark.kernels.device import on_cpu
from turbospark.kernels.kv_rows import RowStore
from turbospark.kernels.latent import (
    JoinedRows,
    LatentGeometry,
    LatentLayer,
    absorbed_queries,
    attend_joined_reference,
    read_values,
)
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import Rope, rope_reference
from turbospark.kernels.target import Attend, AttendLatents, HeadGeometry, KernelSet
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase


class LatentAttention(Unit):
    """Norm and RoPE of the new rows, which go into the cache, then attention over it.

    A GPU has a body for it. Else the cached rows are never expanded: queries go through the keys'
    half of `expand`, sums of latents through the values' half, and on a CPU the target's attention
    reads the rows, as keys and values of one head.

    Args:
        geometry: of the layer.
        rope: of a head's rotated part.
        norm: of the latent, [L].
        expand: [H * (N + V), L]; of each head the keys' rows stand before the values'.
        scale: factor of the scores.
    """

    def __init__(
        self,
        geometry: LatentGeometry,
        rope: Rope,
        *,
        norm: RMSNorm,
        expand: Linear,
        scale: float,
    ) -> None:
        self._geometry, self._rope, self._scale = geometry, rope, scale
        self._norm, self._expand = norm, expand
        self._attend: Attend | None = None
        self._run: AttendLatents | None = None

    @property
    def geometry(self) -> LatentGeometry:
        """Sizes of the layer."""
        return self._geometry

    def bind(self, kernels: KernelSet) -> None:
        sizes, norm, expand = self._geometry, self._norm.value, self._expand.value
        heads = HeadGeometry(sizes.num_heads, 1, sizes.row_dim)
        layer = LatentLayer(sizes, self._rope, norm, expand, self._scale)
        self._run = kernels.latent_attention(layer)
        self._attend = kernels.attend(heads, self._scale, None, None) if on_cpu() else None
        self.body = kernels.name if self._run or self._attend else Unit.body

    def __call__(self, q: mx.array, row: mx.array, cache: RowStore, phase: Phase) -> mx.array:
        """Append a step's rows and attend from its queries.

        Args:
            q: [T, H * (N + R)], not rotated.
            row: [T, L + R], latents before their norm and keys before their rotation.
            cache: advanced by T.
            phase: prefill or decode.

        Returns:
            [T, H * V].
        """
        made = None if self._run is None else self._run(q, row, cache, phase)
        if made is not None:
            return made
        keys, values = head_halves(self._expand.value, self._geometry)
        queries = absorbed_queries(self._turned(q, row, cache), keys)
        joined = JoinedRows(cache)
        if self._attend is None:
            sums = attend_joined_reference(queries, joined, self._scale)
        else:
            sums = self._attend(queries, joined, phase)
        return read_values(sums, values)

    def _turned(self, q: mx.array, row: mx.array, cache: RowStore) -> mx.array:
        """Queries [T, H, N + R] with their last part rotated; the new rows are appended."""
        sizes, offset = self._geometry, cache.offset
        T, L, N = q.shape[0], sizes.latent_dim, sizes.key_dim
        latent = rms_norm_reference(row[:, :L], self._norm.value)
        key = rope_reference(row[:, None, L:], self._rope, offset)  # [T, 1, R]
        q = mx.reshape(q, (T, sizes.num_heads, -1))
        turned = rope_reference(q[..., N:], self._rope, offset)
        cache.append(key, latent[:, None])
        return mx.concatenate([q[..., :N], turned], axis=-1)


def head_halves(weight: Weight, sizes: LatentGeometry) -> tuple[Weight, Weight]:
    """The keys' rows [H, N, L] and the values' [H, V, L] of a matrix; codes stay what they are.

    Args:
        weight: [H * (N + V), L].
        sizes: of the layer.
    """

    def cut(part: mx.array, rows: slice) -> mx.array:
        return mx.reshape(part, (sizes.num_heads, -1, part.shape[-1]))[:, rows]

    def half(rows: slice) -> Weight:
        if not isinstance(weight, QuantizedWeight):
            return cut(weight, rows)
        biases = None if weight.biases is None else cut(weight.biases, rows)
        return replace(
            weight, codes=cut(weight.codes, rows), scales=cut(weight.scales, rows), biases=biases
        )

    return half(slice(0, sizes.key_dim)), half(slice(sizes.key_dim, None))

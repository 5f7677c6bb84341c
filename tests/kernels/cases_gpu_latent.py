"""Cases of latent attention: codes and floats, both kinds of pairs, chunks, sealed rows, tails."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.matrices import relative_error, rows

from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.latent import LatentUnit, latent_queries, latent_step
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.latent import LatentGeometry, LatentLayer
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.rope import Rope
from turbospark.kernels.weights import Norm, QuantizedWeight, Weight

EPS, SCALE = 3e-2, 0.4  # large, so that leaving one out shows


@dataclass(frozen=True)
class LatentCase:
    """`layout` is 4-bit groups, with a zero code if negative, or None for floats."""

    T: int
    sizes: tuple[int, int, int, int, int]  # H, L, R, N, V
    start: int
    sealed: int  # memory for sealed rows; 0 if all rows are in the tail
    boundary: int
    layout: int | None = 32
    tail: int = 21
    dtype: mx.Dtype = mx.float32
    traditional: bool = True

    def __str__(self) -> str:
        size = "x".join(map(str, self.sizes))
        text = f"T{self.T}-{size}-at{self.start}-{self.layout}-{self.dtype}"
        return text.replace("mlx.core.", "")

    @property
    def geometry(self) -> LatentGeometry:
        return LatentGeometry(*self.sizes)

    def expand(self) -> Weight:
        dense = rows(self.geometry.expanded, self.geometry.latent_dim, seed=1) / 4
        if self.layout is None:
            return dense.astype(self.dtype)
        scales_type = mx.float32 if self.dtype == mx.float32 else self.dtype
        codes, scales, biases = mx.quantize(dense.astype(scales_type), abs(self.layout), 4)
        if self.layout > 0:
            return QuantizedWeight(codes, scales, biases, 4, self.layout)
        return QuantizedWeight(codes, scales, None, 4, -self.layout, zero=7)

    def unit(self) -> LatentUnit:
        sizes = self.geometry
        norm = Norm(1 + rows(1, sizes.latent_dim, seed=2)[0] / 3, EPS)
        rope = Rope.build("default", 1e3, sizes.rope_dim, traditional=self.traditional)
        rope = Rope(rope.inv_freq, rope.head_dim, 1.25, rope.traditional)
        return LatentUnit.build(LatentLayer(sizes, rope, norm, self.expand(), SCALE))

    def inputs(self) -> tuple[mx.array, mx.array]:
        """Queries [T, H * (N + R)] and rows [T, L + R]."""
        sizes = self.geometry
        q = rows(self.T, sizes.num_heads * sizes.query_dim, seed=3)
        return q.astype(self.dtype), rows(self.T, sizes.row_dim, seed=4).astype(self.dtype)

    def held(self) -> np.ndarray:
        """Latent and key of every position before these [start, L + R], as the cache holds them."""
        x = rows(self.start + 1, self.geometry.row_dim, seed=5)[: self.start]
        return np.array(x.astype(self.dtype).astype(mx.float32))

    def step_rows(self) -> StepRows:
        L = self.geometry.latent_dim
        held = self.held()
        blocks = []
        for part, room in (
            (held[: self.boundary], self.sealed),
            (held[self.boundary :], self.tail),
        ):
            memory = np.full((room, held.shape[1]), np.nan, np.float32)
            memory[: len(part)] = part
            k, v = (mx.array(memory[None, :, at]) for at in (slice(L, None), slice(0, L)))
            blocks.append(RowBlock(k.astype(self.dtype), v.astype(self.dtype)))
        sealed, tail = blocks
        lengths = mx.array([self.boundary, self.start], mx.int32)
        return StepRows(sealed if self.sealed else tail, tail, lengths)

    def run(self, target: GpuTarget) -> tuple[mx.array, RowBlock]:
        (q, row), before, unit = self.inputs(), self.step_rows(), self.unit()
        queries, tail = latent_queries(q, row, before, unit, target=target)
        sealed = tail if before.sealed is before.tail else before.sealed
        after = StepRows(sealed, tail, before.lengths)
        return latent_step(queries, after, unit, q.dtype, target=target), tail

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Results [T, H * V] and the tail's rows up to the newest [n, L + R], in float64."""
        sizes, layer = self.geometry, self.unit().layer
        H, L, N = sizes.num_heads, sizes.latent_dim, sizes.key_dim
        q, row = (np.array(x.astype(mx.float32)).astype(np.float64) for x in self.inputs())
        latent = row[:, :L] / np.sqrt((row[:, :L] ** 2).mean(-1, keepdims=True) + EPS)
        latent = latent * np.array(layer.norm.weight, np.float64)
        own = np.concatenate([latent, self._turned(row[:, None, L:])[:, 0]], axis=-1)
        every = np.concatenate([self.held().astype(np.float64), own])
        expand = layer.expand
        weight = dequantize_reference(expand) if self.layout else expand
        matrix = np.array(weight.astype(mx.float32)).astype(np.float64).reshape(H, -1, L)
        q = q.reshape(self.T, H, -1)
        wide = np.einsum("thn,hnl->thl", q[..., :N], matrix[:, :N])
        scores = np.einsum("thl,pl->thp", wide, every[:, :L])
        scores += np.einsum("thr,pr->thp", self._turned(q[..., N:]), every[:, L:])
        seen = np.arange(len(every))[None] <= self.start + np.arange(self.T)[:, None]
        scores = np.where(seen[:, None], scores * SCALE, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        sums = np.einsum("thp,pl->thl", shares, every[:, :L])
        out = np.einsum("thl,hvl->thv", sums, matrix[:, N:]).reshape(self.T, -1)
        return out, every[self.boundary :]

    def _turned(self, x: np.ndarray) -> np.ndarray:
        rope, out = self.unit().layer.rope, x.copy()
        P = rope.inv_freq.size
        positions = np.arange(self.start, self.start + self.T, dtype=np.float32)
        angles = (positions[:, None] * rope.inv_freq).astype(np.float64)[:, None]
        cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
        a = slice(0, 2 * P, 2) if rope.traditional else slice(0, P)
        b = slice(1, 2 * P, 2) if rope.traditional else slice(P, 2 * P)
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
        return out

    def errors(self, target: GpuTarget) -> tuple[float, float]:
        """Of the results, and of the new tail."""
        y, tail = self.run(target)
        out, kept = self.expected()
        assert y.shape == out.shape
        assert y.dtype == self.dtype
        count = self.start + self.T - self.boundary
        made = mx.concatenate([tail.v[0, :count], tail.k[0, :count]], axis=-1)
        return (
            relative_error(y.astype(mx.float32), out),
            relative_error(made.astype(mx.float32), kept),
        )


BF16, F16 = mx.bfloat16, mx.float16
CASES = [
    LatentCase(1, (3, 64, 6, 11, 9), start=0, sealed=0, boundary=0),
    LatentCase(3, (5, 96, 10, 7, 33), start=12, sealed=0, boundary=0, layout=-32),
    LatentCase(8, (1, 264, 4, 5, 3), start=40, sealed=48, boundary=33, layout=None),
    LatentCase(2, (7, 128, 66, 19, 35), 45, 64, 41, 64, dtype=BF16, traditional=False),
    LatentCase(5, (2, 512, 64, 24, 41), 70, 80, 64, 128, tail=18, dtype=F16),
    LatentCase(1, (2, 64, 8, 9, 5), start=3100, sealed=3200, boundary=3095),
]

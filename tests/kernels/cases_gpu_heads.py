"""Cases of head_norm_rope: every kind of embedding and norm, rows that lie apart, full tails."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.matrices import relative_error, rows

from turbospark.kernels.gpu.head_norm_rope import HeadUnit, head_norm_rope
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm

EPS = (1e-2, 3e-2, 7e-2)  # large and different, so that leaving one out shows


@dataclass(frozen=True)
class HeadCase:
    """`norms` has a letter each for q, k, v: - none, p plain, w with a weight."""

    T: int
    heads: tuple[int, int]
    D: int
    rope: Rope
    start: int
    held: int  # rows of the tail before these
    norms: str = "ww-"
    tail: int = 41
    dtype: mx.Dtype = mx.float32
    has_kv: bool = True
    q_step: int = 0  # numbers of a head of q, where more than D

    def __str__(self) -> str:
        kind = f"{self.rope.inv_freq.size}{'t' if self.rope.traditional else ''}"
        size = f"T{self.T}-H{self.heads[0]}:{self.heads[1]}-D{self.D}-{kind}-at{self.start}"
        return f"{size}-{self.norms}-{self.dtype}".replace("mlx.core.", "")

    def unit(self) -> HeadUnit:
        norms = [
            None if kind == "-" else Norm(
                None if kind == "p" else 1 + rows(1, self.D, seed=i)[0].astype(self.dtype) / 4, eps
            )
            for i, (kind, eps) in enumerate(zip(self.norms, EPS, strict=True))
        ]  # fmt: skip
        geometry = HeadGeometry(*self.heads, self.D)
        q_norm, k_norm, v_norm = norms
        return HeadUnit.build(geometry, self.rope, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)

    def stacked(self) -> mx.array:
        """q, k and v side by side, as one projection gives them."""
        width = self.heads[0] * (self.q_step or self.D) + 2 * self.heads[1] * self.D
        return rows(self.T, width, seed=5).astype(self.dtype)

    def parts(self) -> tuple[mx.array, mx.array | None, mx.array | None]:
        x, Hq, n = self.stacked(), self.heads[0], self.heads[1] * self.D
        split = Hq * (self.q_step or self.D)
        q = x[:, :split]
        if self.q_step:
            q = mx.unflatten(q, 1, (Hq, self.q_step))
        if not self.has_kv:
            return q, None, None
        return q, x[:, split : split + n], x[:, split + n :]

    def old_tail(self) -> np.ndarray:
        """[2, Hkv, tail, D]; rows not held are NaN."""
        tail = np.array(rows(2 * self.heads[1] * self.tail, self.D, seed=6))
        tail = tail.reshape(2, self.heads[1], self.tail, self.D)
        tail[:, :, self.held :] = np.nan
        return np.array(mx.array(tail).astype(self.dtype).astype(mx.float32))

    def step_rows(self) -> StepRows:
        k, v = (mx.array(part).astype(self.dtype) for part in self.old_tail())
        block = RowBlock(k, v)
        return StepRows(block, block, mx.array([self.start - self.held, self.start], mx.int32))

    def run(self, target: GpuTarget) -> tuple[mx.array, RowBlock | None]:
        return head_norm_rope(*self.parts(), self.step_rows(), self.unit(), target=target)

    def expected(self) -> list[np.ndarray]:
        """Queries [T, Hq, D], and keys and values of the tail's rows up to the newest."""
        parts = [self._heads(x, h) for x, h in zip(self.parts(), (0, 1, 1), strict=True)]
        made = []
        for i, x in enumerate(parts):
            norm = self.unit().norms[i]
            if x is None:
                continue
            if norm is not None:
                x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps)
                if norm.weight is not None:
                    x = x * np.array(norm.weight.astype(mx.float32))
            made.append(self._rotated(x) if i < 2 else x)
        tails = [
            np.concatenate([old[:, : self.held], new.swapaxes(0, 1)], axis=1)
            for old, new in zip(self.old_tail(), made[1:], strict=False)
        ]
        return [made[0], *tails]

    def _heads(self, x: mx.array | None, kind: int) -> np.ndarray | None:
        if x is None:
            return None
        wide = np.array(mx.contiguous(x).astype(mx.float32)).astype(np.float64)
        return wide.reshape(self.T, self.heads[kind], -1)[..., : self.D]

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        P, out = self.rope.inv_freq.size, x.copy()
        positions = np.arange(self.start, self.start + self.T, dtype=np.float32)
        angles = (positions[:, None] * self.rope.inv_freq).astype(np.float64)[:, None]
        cos, sin = np.cos(angles) * self.rope.magnitude, np.sin(angles) * self.rope.magnitude
        a = slice(0, 2 * P, 2) if self.rope.traditional else slice(0, P)
        b = slice(1, 2 * P, 2) if self.rope.traditional else slice(P, 2 * P)
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
        return out

    def error(self, target: GpuTarget) -> float:
        y, tail = self.run(target)
        assert y.dtype == self.dtype
        made = [y]
        if tail is not None:
            count = self.held + self.T
            made += [tail.k[:, :count], tail.v[:, :count]]
        expected = self.expected()
        assert len(made) == len(expected)
        pairs = zip(made, expected, strict=True)
        return float(
            np.max([relative_error(one.astype(mx.float32), other) for one, other in pairs])
        )


BF16, F16 = mx.bfloat16, mx.float16
YARN = Rope.build("yarn", 1e6, 96, factor=4.0, original_max_position_embeddings=32768)
CASES = [
    HeadCase(1, (3, 1), 64, Rope.build("default", 1e4, 64), start=131_000, held=0),
    HeadCase(2, (6, 2), 96, YARN, start=70, held=17, dtype=F16),
    HeadCase(8, (5, 1), 80, Rope.build("default", 1e4, 80, traditional=True), 3, 3, "wp-"),
    HeadCase(3, (7, 1), 128, Rope.build("linear", 1e6, 128, factor=8.0), 999, 38, "--w",
             dtype=BF16),
    HeadCase(5, (4, 2), 256, Rope.build("default", 1e4, 256, partial_rotary_factor=0.25), 12, 9,
             "wwp", dtype=BF16, q_step=512),
    HeadCase(4, (2, 1), 512, Rope.build("proportional", 1e6, 512, partial_rotary_factor=0.25),
             77, 16, "wwp"),
    HeadCase(7, (3, 1), 32, Rope.build("default", 1e4, 32), 500, 5, "w--", has_kv=False),
    HeadCase(1, (2, 2), 24, Rope.build("default", 1e4, 24, partial_rotary_factor=0.5,
                                       traditional=True), 40, 40, "pww", dtype=F16),
]  # fmt: skip

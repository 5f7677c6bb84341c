"""Cases of rotated_attention: heads to norm and rotate, over rows that end anywhere."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.matrices import rows

from turbospark.kernels.gpu.attention_decode import attention_step
from turbospark.kernels.gpu.head_norm_rope import head_norm_rope
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rotated_attention import HeadInputs, RotatedLayer, rotated_attention
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import AttentionLayer, HeadGeometry
from turbospark.kernels.weights import Norm

SCALE = 0.3
BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


@dataclass(frozen=True)
class RotatedCase:
    """Positions below `boundary` are sealed, [boundary, start) in the tail, then T new ones.

    `gate` is full, wide (numbers of heads lie apart), head (one a head), or nothing.
    """

    T: int
    heads: tuple[int, int]
    D: int
    start: int
    boundary: int
    sealed: int = 0  # capacity; 0 where all rows lie in the tail
    tail: int = 128
    window: int | None = None
    sinks: bool = False
    gate: str = ""
    norms: str = "ww-"
    rope: Rope | None = None
    q_step: int = 0
    has_kv: bool = True
    dtype: mx.Dtype = F32
    kv_dtype: mx.Dtype | None = None

    def __str__(self) -> str:
        sizes = f"T{self.T}-H{self.heads[0]}:{self.heads[1]}-D{self.D}-{self.boundary}:{self.start}"
        marks = [self.norms, f"w{self.window}", "sinks" * self.sinks, self.gate]
        marks += ["" if self.has_kv else "alone", str(self.dtype).replace("mlx.core.", "")]
        return "-".join([sizes, *filter(None, marks)])

    def layer(self, *, bundled: bool = False) -> RotatedLayer:
        q_norm, k_norm, v_norm = (
            None if kind == "-" else Norm(
                None if kind == "p" else 1 + rows(1, self.D, seed=i)[0].astype(self.dtype) / 4,
                0.01 + 0.03 * i,
            )
            for i, kind in enumerate(self.norms)
        )  # fmt: skip
        rope = self.rope or Rope.build("default", 1e4, self.D)
        scores = 2 + rows(1, self.heads[0], seed=9)[0] if self.sinks else None
        heads, norms = HeadGeometry(*self.heads, self.D), (q_norm, k_norm, v_norm)
        layer = AttentionLayer(heads, rope, norms, SCALE, self.window, scores)
        return RotatedLayer.build(layer, bundled=bundled)

    def inputs(self) -> HeadInputs:
        """Slices of one stacked projection."""
        (Hq, Hkv), D = self.heads, self.D
        wide = self.q_step or D
        x = rows(self.T, 2 * Hq * (wide + 3) + 2 * Hkv * D, seed=5).astype(self.dtype)
        q, kv = x[:, : Hq * wide], x[:, Hq * wide :]
        if self.q_step:
            q = mx.unflatten(q, 1, (Hq, wide))
        k, v, rest = kv[:, : Hkv * D], kv[:, Hkv * D : 2 * Hkv * D], kv[:, 2 * Hkv * D :]
        gates = {
            "": None,
            "full": rest[:, : Hq * D],
            "wide": mx.unflatten(rest[:, : Hq * (D + 3)], 1, (Hq, D + 3)),
            "head": rest[:, :Hq],
        }
        gate = gates[self.gate]
        return HeadInputs(q, k, v, gate) if self.has_kv else HeadInputs(q, gate=gate)

    def step_rows(self) -> StepRows:
        """Rows that no position names hold NaN; the step's own too, if it writes them."""
        kinds, dtype = [], self.kv_dtype or self.dtype
        for seed in (6, 7):
            end = self.start + (0 if self.has_kv else self.T)
            x = np.array(rows(self.heads[1] * end, self.D, seed=seed))
            x = x.reshape(self.heads[1], end, self.D)
            tail = np.full((self.heads[1], self.tail, self.D), np.nan, np.float32)
            tail[:, : end - self.boundary] = x[:, self.boundary :]
            sealed = np.full((self.heads[1], max(self.sealed, 1), self.D), np.nan, np.float32)
            for p in range(max(0, self.boundary - self.sealed), self.boundary):
                sealed[:, p % self.sealed] = x[:, p]
            kinds.append([mx.array(part).astype(dtype) for part in (sealed, tail)])
        sealed, tail = (RowBlock(*pair) for pair in zip(*kinds, strict=True))
        lengths = mx.array([self.boundary, self.start], mx.int32)
        return StepRows(sealed if self.sealed else tail, tail, lengths)

    def run(self, target: GpuTarget, *, bundled: bool = False) -> tuple[mx.array, RowBlock | None]:
        layer = self.layer(bundled=bundled)
        return rotated_attention(self.inputs(), self.step_rows(), layer, target=target)

    def apart(self, target: GpuTarget) -> tuple[mx.array, RowBlock | None]:
        """The same by one body after the other."""
        x, given, rotated = self.inputs(), self.step_rows(), self.layer()
        y, tail = head_norm_rope(x.q, x.k, x.v, given, rotated.unit, target=target)
        if tail is not None:
            is_all = given.sealed is given.tail
            given = StepRows(tail if is_all else given.sealed, tail, given.lengths)
        layer = rotated.layer
        out = attention_step(
            y, given, layer.scale, layer.window, layer.sinks, x.gate, target=target
        )
        return out, tail


YARN = Rope.build("yarn", 1e6, 96, factor=4.0, original_max_position_embeddings=32768)
PARTIAL = Rope.build("default", 1e4, 256, partial_rotary_factor=0.25)
CASES = [
    RotatedCase(1, (3, 3), 64, start=0, boundary=0),
    RotatedCase(1, (6, 2), 96, 131, 128, sealed=128, tail=37, rope=YARN, gate="full", dtype=F16),
    RotatedCase(2, (4, 1), 80, 256, 256, sealed=260, norms="wp-",
                rope=Rope.build("default", 1e4, 80, traditional=True)),
    RotatedCase(3, (5, 1), 128, 254, 253, sealed=384, gate="wide", dtype=BF16, sinks=True),
    RotatedCase(8, (7, 1), 64, 120, 0, sinks=True, norms="--p", gate="head"),
    RotatedCase(5, (4, 2), 256, 37, 0, rope=PARTIAL, q_step=512, gate="full", dtype=BF16),
    RotatedCase(4, (2, 1), 512, 140, 128, sealed=128, norms="wwp", dtype=F16),
    RotatedCase(4, (4, 2), 64, 290, 256, sealed=256, window=131, sinks=True, dtype=BF16),
    RotatedCase(3, (6, 3), 96, 413, 400, sealed=139, tail=17, window=130, norms="---",
                rope=Rope.still(96), dtype=F16, kv_dtype=F16),
    RotatedCase(8, (3, 1), 32, 61, 58, sealed=22, window=11, dtype=BF16, gate="full"),
    RotatedCase(7, (3, 1), 32, 120, 0, norms="w--", has_kv=False, dtype=F16, gate="full"),
    RotatedCase(2, (6, 2), 64, 130, 128, sealed=128, norms="w--", has_kv=False, dtype=BF16),
    RotatedCase(1, (2, 2), 24, 60, 40, sealed=64, norms="pw-", kv_dtype=BF16,
                rope=Rope.build("default", 1e4, 24, partial_rotary_factor=0.5, traditional=True)),
]  # fmt: skip

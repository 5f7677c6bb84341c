"""Cases of attention_decode: grouped heads, blocks that end anywhere, windows, wrapped rings."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.matrices import relative_error

from turbospark.kernels.gpu.attention_decode import attention_decode
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.kv_rows import KVRows, RowBlock

SCALE = 0.3


@dataclass(frozen=True)
class AttentionCase:
    """Positions [first, boundary) are sealed, [boundary, end) are in the tail."""

    T: int
    heads: tuple[int, int]  # query, key/value
    D: int
    end: int
    boundary: int
    first: int = 0
    sealed: int = 0  # capacities; 0 for no block
    tail: int = 0
    window: int | None = None
    sinks: bool = False
    dtype: mx.Dtype = mx.float32
    kv_dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        sizes = f"T{self.T}-H{self.heads[0]}:{self.heads[1]}-D{self.D}-{self.boundary}:{self.end}"
        kinds = f"-{self.dtype}-{self.kv_dtype}".replace("mlx.core.", "")
        ring = f"-ring{self.sealed}" if self.first else ""
        window = f"-w{self.window}" if self.window else ""
        return sizes + ring + window + ("-sinks" if self.sinks else "") + kinds

    def arrays(self) -> dict[str, np.ndarray]:
        """Queries, all rows by position, sinks: as the dtypes of the case hold them."""
        rng = np.random.default_rng(self.end)
        Hq, Hkv = self.heads
        drawn = {
            "q": (rng.normal(size=(self.T, Hq, self.D)), self.dtype),
            "k": (rng.normal(size=(Hkv, self.end, self.D)), self.kv_dtype),
            "v": (rng.normal(size=(Hkv, self.end, self.D)), self.kv_dtype),
            "sinks": (2 + rng.normal(size=Hq), mx.float32),
        }
        return {
            name: np.array(mx.array(a.astype(np.float32)).astype(dtype).astype(mx.float32))
            for name, (a, dtype) in drawn.items()
        }

    def rows(self) -> KVRows:
        """The cache's rows; rows that no position names hold NaN."""
        k, v = (self.arrays()[name] for name in ("k", "v"))
        positions = np.arange(self.first, self.boundary)
        sealed = self._block(k, v, self.sealed, positions, positions % max(self.sealed, 1))
        positions = np.arange(self.boundary, self.end)
        tail = self._block(k, v, self.tail, positions, positions - self.boundary)
        return KVRows(sealed, tail, self.first, self.boundary, self.end)

    def _block(self, k, v, capacity: int, positions, slots) -> RowBlock | None:
        if capacity == 0:
            return None
        arrays = []
        for values in (k, v):
            block = np.full((self.heads[1], capacity, self.D), np.nan, np.float32)
            block[:, slots] = values[:, positions]
            arrays.append(mx.array(block).astype(self.kv_dtype))
        return RowBlock(*arrays)

    def expected(self) -> np.ndarray:
        a = {name: values.astype(np.float64) for name, values in self.arrays().items()}
        Hq, Hkv = self.heads
        out = np.zeros((self.T, Hq, self.D))
        for t in range(self.T):
            position = self.end - self.T + t
            start = 0 if self.window is None else max(0, position - self.window + 1)
            for h in range(Hq):
                k, v = (a[name][h * Hkv // Hq, start : position + 1] for name in ("k", "v"))
                scores = k @ a["q"][t, h] * SCALE
                top = max(scores.max(), a["sinks"][h])
                weights = np.exp(scores - top)
                sink = np.exp(a["sinks"][h] - top) if self.sinks else 0.0
                out[t, h] = weights @ v / (weights.sum() + sink)
        return out.reshape(self.T, -1)

    def run(self, target: GpuTarget | None) -> mx.array:
        a = self.arrays()
        q = mx.array(a["q"]).astype(self.dtype)
        sinks = mx.array(a["sinks"]) if self.sinks else None
        return attention_decode(q, self.rows(), SCALE, self.window, sinks, target=target)

    def error(self, target: GpuTarget | None) -> float:
        y = self.run(target)
        assert y.dtype == self.dtype
        return relative_error(y.astype(mx.float32), self.expected())


BF16, F16 = mx.bfloat16, mx.float16
CASES = [
    AttentionCase(1, (3, 3), 64, end=1, boundary=0, tail=128),
    AttentionCase(1, (6, 2), 96, end=131, boundary=128, sealed=128, tail=7),
    AttentionCase(2, (4, 1), 80, end=257, boundary=257, sealed=260, dtype=F16, kv_dtype=F16),
    AttentionCase(3, (5, 1), 128, 300, 256, sealed=384, tail=128, dtype=BF16, kv_dtype=BF16),
    AttentionCase(5, (7, 1), 64, 150, 128, sealed=256, tail=128, sinks=True, kv_dtype=F16),
    AttentionCase(1, (2, 1), 512, 140, 128, sealed=128, tail=128, dtype=F16, kv_dtype=BF16),
    AttentionCase(2, (10, 2), 256, 37, 0, tail=128, sinks=True),
    # Windows: over whole blocks, and rings that have wrapped.
    AttentionCase(4, (4, 2), 64, 290, 256, sealed=256, tail=128, window=131, sinks=True),
    AttentionCase(3, (6, 3), 96, 413, 400, first=261, sealed=139, tail=17, window=130),
    AttentionCase(8, (3, 1), 32, 61, 58, first=36, sealed=22, tail=128, window=11),
]

# For tensor cores: every shape of a warp, one and two tiles of queries.
TENSOR_CASES = [
    AttentionCase(3, (5, 1), 128, 300, 256, sealed=384, tail=128, dtype=BF16, kv_dtype=BF16),
    AttentionCase(7, (6, 2), 64, 290, 256, sealed=256, tail=128, window=131, sinks=True,
                  dtype=F16, kv_dtype=F16),
    AttentionCase(2, (10, 2), 96, 413, 400, first=261, sealed=139, tail=17, window=130,
                  dtype=BF16, kv_dtype=BF16),
    AttentionCase(8, (3, 1), 32, 61, 58, first=36, sealed=22, tail=128, window=11,
                  dtype=BF16, kv_dtype=BF16),
    AttentionCase(4, (3, 1), 192, end=137, boundary=128, sealed=128, tail=128,
                  dtype=F16, kv_dtype=F16),
    AttentionCase(1, (8, 2), 256, end=140, boundary=140, sealed=150, dtype=F16, kv_dtype=F16),
    AttentionCase(5, (2, 1), 384, end=37, boundary=0, tail=128, dtype=F16, kv_dtype=F16),
    AttentionCase(1, (2, 1), 512, end=135, boundary=128, sealed=128, tail=128,
                  dtype=BF16, kv_dtype=BF16),
]  # fmt: skip

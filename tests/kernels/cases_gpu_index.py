"""Cases of a block index: sizes, places in tail and sealed rows, ratios, strided rows."""

from dataclasses import dataclass

import mlx.core as mx
from kernels.matrices import rows

from turbospark.kernels.block_sparse import IndexGeometry
from turbospark.kernels.gpu.index_rows import IndexUnit, index_rows
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.rope import Rope
from turbospark.kernels.weights import Norm

EPS = 1e-2  # large, so that leaving it out shows


@dataclass(frozen=True)
class IndexCase:
    T: int
    dims: int
    pairs: int
    ratio: int
    start: int
    boundary: int = 0
    dtype: mx.Dtype = mx.float32
    is_stacked: bool = False

    def __str__(self) -> str:
        size = f"T{self.T}-{self.dims}-{self.pairs}-by{self.ratio}-at{self.start}"
        stacked = "-stacked" * self.is_stacked
        return f"{size}-{self.boundary}-{self.dtype}{stacked}".replace("mlx.core.", "")

    def raw(self) -> mx.array:
        x = rows(self.T, 3 * self.dims).astype(self.dtype)
        part = x[:, 2 * self.dims :]
        return part if self.is_stacked else mx.contiguous(part)

    def rows(self) -> StepRows:
        def block(count: int, seed: int) -> RowBlock:
            k, v = (rows(count, self.dims, seed=seed + i)[None].astype(self.dtype) for i in (0, 1))
            return RowBlock(k, v)

        tail = block(21, 3)
        sealed = block(64, 5) if self.boundary else tail
        return StepRows(sealed, tail, mx.array([self.boundary, self.start, 0, 0], mx.int32))

    @property
    def index(self) -> IndexGeometry:
        return IndexGeometry(2, self.dims, 4 * self.ratio, self.ratio)

    def norm(self) -> Norm:
        return Norm(1 + rows(1, self.dims, seed=8)[0].astype(self.dtype) / 3, EPS)

    def rope(self) -> Rope:
        table = Rope.build("default", 50.0, 2 * self.pairs).inv_freq
        return Rope(table, self.dims, 1.25)

    def run(self, target: GpuTarget) -> RowBlock:
        unit = IndexUnit.build(self.index, self.norm(), self.rope())
        return index_rows(self.raw(), self.rows(), unit, target=target)


F16, BF16 = mx.float16, mx.bfloat16
CASES = [
    IndexCase(1, 9, 3, 3, 0),
    IndexCase(1, 9, 3, 3, 5),
    IndexCase(4, 40, 16, 3, 7),
    IndexCase(8, 33, 16, 4, 3, is_stacked=True),
    IndexCase(1, 128, 32, 4, 59, 58, BF16),
    IndexCase(5, 128, 32, 4, 59, 59, F16, is_stacked=True),
    IndexCase(2, 70, 1, 1, 50, 44),
    IndexCase(3, 16, 8, 7, 60, 59),
]

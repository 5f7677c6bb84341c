"""Cases of the chain of a layer's second half: odd group counts, pairwise different sizes."""

from dataclasses import dataclass

import mlx.core as mx
from kernels.matrices import quantized, rows

from turbospark.kernels.gpu.int4_chain import (
    COUNTERS,
    ChainGeometry,
    Int4Chain,
    int4_chain,
)
from turbospark.kernels.gpu.int4_mma import Geometry, int4_mma
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.weights import Activation, Norm, QuantizedWeight

BRAIN, HALF, WIDE = mx.bfloat16, mx.float16, mx.float32
SEPARATE = Geometry(8, 4, 2, 1, True)
"""A cut of separate products whose sums have the chain's order."""


@dataclass(frozen=True)
class ChainCase:
    M: int
    K: int
    C: int
    I: int  # noqa: E741 - the body's name
    dtype: mx.Dtype = BRAIN
    scale_dtype: mx.Dtype = BRAIN
    zero: bool = False
    bias: tuple[int, ...] = ()
    has_norm_weight: bool = True
    activation: Activation = "silu"
    cut: ChainGeometry | None = None
    has_post_norms: bool = False

    def __str__(self) -> str:
        kinds = f"{self.dtype}-{self.scale_dtype}".replace("mlx.core.", "")
        post = "-post" if self.has_post_norms else ""
        cut = "" if self.cut is None else f"-ring{self.cut.ring}-tall{self.cut.tall}"
        return f"{self.M}x{self.K}-{self.C}-{self.I}-{kinds}-{self.activation}{cut}{post}"

    def chain(self) -> Int4Chain:
        K, C, I = self.K, self.C, self.I  # noqa: E741
        shapes = [(C, K), (I, C), (I, C), (C, I)]
        weights = [
            quantized(
                N, inner, 4, 64, zero=self.zero, scale_dtype=self.scale_dtype, seed=N + i
            )[0]
            for i, (N, inner) in enumerate(shapes)
        ]  # fmt: skip
        biases = [
            rows(1, N, seed=N + i)[0].astype(self.scale_dtype) if i in self.bias else None
            for i, (N, _) in enumerate(shapes)
        ]
        weight = rows(1, C, seed=7)[0] + 2.0 if self.has_norm_weight else None
        posts = [Norm(rows(1, C, seed=8 + i)[0] + 1.5, 1e-3 / (i + 1)) for i in range(2)]
        post_norms = (posts[0], posts[1]) if self.has_post_norms else None
        norm = Norm(weight, 1e-3)
        made = Int4Chain.build(weights, biases, norm, self.activation, post_norms)
        assert made is not None
        return made

    def x(self) -> mx.array:
        return rows(self.M, self.K).astype(self.dtype)

    def residual(self) -> mx.array:
        return rows(self.M, self.C, seed=3).astype(self.dtype)

    def run(self, target: GpuTarget) -> mx.array:
        counters = mx.zeros((COUNTERS,), mx.int32)
        return int4_chain(self.chain(), self.x(), self.residual(), counters, target, self.cut)


def three_launches(
    chain: Int4Chain,
    x: mx.array,
    residual: mx.array,
    target: GpuTarget,
    cut: Geometry | None = SEPARATE,
) -> mx.array:
    """The chain as separate products, and as norms between them."""
    output, gate, up, down = chain.weights
    first, *pair, last = chain.biases

    def added(
        w: QuantizedWeight, bias: mx.array | None, x: mx.array, h: mx.array, i: int
    ) -> mx.array:
        product = Int4Product((w,), (bias,), residual=chain.post_norms is None)
        if chain.post_norms is None:
            return int4_mma(product, x, h, target, cut)[0]
        y = int4_mma(product, x, None, target, cut)[0]
        return rms_norm(y, chain.post_norms[i], h, target=target)

    h = added(output, first, x, residual, 0)
    middle = Int4Product((gate, up), tuple(pair), chain.norm, chain.activation)
    inner = int4_mma(middle, h, None, target, cut)[0]
    return added(down, last, inner, h, 1)


DIRECT = ChainGeometry(3, 1, staged_x=False, staged_inner=False, tall=2)
CASES = [
    ChainCase(1, 192, 320, 448, HALF, HALF),
    ChainCase(2, 704, 128, 576, BRAIN, WIDE, bias=(0, 3), activation="gelu_tanh"),
    ChainCase(3, 64, 256, 832, HALF, BRAIN, zero=True, has_norm_weight=False),
    ChainCase(4, 512, 192, 768, BRAIN, BRAIN, cut=ChainGeometry(2, 1)),
    ChainCase(5, 1088, 64, 640, HALF, HALF, bias=(1, 2), cut=DIRECT),
    ChainCase(8, 576, 384, 2368, BRAIN, BRAIN, bias=(2,), cut=ChainGeometry(5, 2, tall=2)),
    ChainCase(1, 320, 192, 704, BRAIN, BRAIN, activation="gelu_tanh", has_post_norms=True),
    ChainCase(7, 128, 448, 576, BRAIN, WIDE, bias=(0, 3), has_post_norms=True, cut=DIRECT),
]

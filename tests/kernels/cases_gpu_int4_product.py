"""Cases of fused products: every form, odd columns and group counts, pairwise different sizes."""

from dataclasses import dataclass, replace

import mlx.core as mx
from kernels.matrices import quantized, rows

from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.weights import Activation, Norm

BRAIN, HALF, WIDE = mx.bfloat16, mx.float16, mx.float32

# Of the largest result: float32 sums, one rounded result, one rounded result after a rounded norm.
TOLERANCE = {WIDE: 1e-5, HALF: 1e-3, BRAIN: 5e-3}


@dataclass(frozen=True)
class ProductCase:
    M: int
    widths: tuple[int, ...]
    K: int
    group_size: int = 64
    dtype: mx.Dtype = WIDE
    scale_dtype: mx.Dtype = WIDE
    zero: bool = False
    norm: str = ""
    bias: tuple[int, ...] = ()
    activation: Activation | None = None
    softcap: float | None = None
    residual: bool = False
    out: mx.Dtype | None = None

    def __str__(self) -> str:
        kinds = f"{self.dtype}-{self.scale_dtype}".replace("mlx.core.", "")
        forms = [
            self.norm, self.activation or "", "residual" if self.residual else "",
            "softcap" if self.softcap else "", "bias" if self.bias else "",
        ]  # fmt: skip
        shape = "+".join(map(str, self.widths))
        names = "-".join(form for form in forms if form) or "plain"
        return f"{self.M}x{shape}x{self.K}-g{self.group_size}-{kinds}-{names}"

    def product(self) -> Int4Product:
        made = [
            quantized(
                N, self.K, 4, self.group_size,
                zero=self.zero, scale_dtype=self.scale_dtype, seed=N + i,
            )[0]
            for i, N in enumerate(self.widths)
        ]  # fmt: skip
        biases = [
            rows(1, N, seed=N)[0].astype(self.scale_dtype) if i in self.bias else None
            for i, N in enumerate(self.widths)
        ]
        weight = rows(1, self.K, seed=7)[0] + 2.0 if self.norm == "norm" else None
        norm = Norm(weight, 1e-3) if self.norm else None
        return Int4Product(
            tuple(made), tuple(biases), norm, self.activation, self.softcap, self.residual, self.out
        )

    def x(self) -> mx.array:
        return rows(self.M, self.K).astype(self.dtype)

    def added(self) -> mx.array | None:
        if not self.residual:
            return None
        return rows(self.M, self.widths[0], seed=3).astype(self.dtype)

    def in_groups_of_64(self) -> "ProductCase":
        """The same in what tensor cores take."""
        K = -(-self.K // 64) * 64
        dtype = HALF if self.dtype == WIDE else self.dtype
        return replace(self, K=K, group_size=64, dtype=dtype)


CASES = [
    ProductCase(1, (13,), 192, bias=(0,)),
    ProductCase(2, (37, 21), 320, 32, BRAIN, BRAIN, norm="norm"),
    ProductCase(3, (67, 9, 35), 704, 64, HALF, HALF, norm="norm", bias=(1,)),
    ProductCase(4, (11, 19, 5, 34), 512, 128, HALF, BRAIN, norm="bare", bias=(0, 3)),
    ProductCase(5, (43, 43), 576, 64, BRAIN, WIDE, norm="norm", activation="silu", bias=(1,)),
    ProductCase(6, (23, 23), 640, 64, HALF, HALF, activation="gelu_tanh", zero=True),
    ProductCase(7, (41,), 1152, 64, WIDE, BRAIN, residual=True, bias=(0,)),
    ProductCase(8, (29,), 1088, 64, BRAIN, BRAIN, residual=True),
    ProductCase(1, (131,), 384, 64, BRAIN, BRAIN, norm="norm", softcap=2.5, out=WIDE),
    ProductCase(3, (31, 31), 448, 64, WIDE, WIDE, norm="norm", activation="gelu_erf", bias=(0,)),
]

"""Cases of int4_gemv: odd columns, odd group counts, every geometry and kind of scales."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.matrices import quantized, rows

from turbospark.kernels.weights import QuantizedWeight


@dataclass(frozen=True)
class GemvCase:
    M: int
    N: int
    K: int
    group_size: int
    dtype: mx.Dtype = mx.float32
    scale_dtype: mx.Dtype = mx.float32
    zero: bool = False

    def __str__(self) -> str:
        kinds = f"{self.dtype}-{self.scale_dtype}".replace("mlx.core.", "")
        zero = "-zero" if self.zero else ""
        return f"{self.M}x{self.N}x{self.K}-g{self.group_size}-{kinds}{zero}"

    def weight(self) -> tuple[QuantizedWeight, np.ndarray]:
        return quantized(
            self.N,
            self.K,
            4,
            self.group_size,
            zero=self.zero,
            scale_dtype=self.scale_dtype,
            seed=self.N,
        )

    def x(self) -> mx.array:
        return rows(self.M, self.K).astype(self.dtype)


CASES = [
    GemvCase(1, 13, 32, 32),
    GemvCase(1, 37, 512, 64, mx.float16, mx.float16),
    GemvCase(2, 515, 96, 32, mx.bfloat16, mx.bfloat16),
    GemvCase(3, 21, 704, 64, mx.float16, mx.float32),
    GemvCase(4, 9, 1408, 128, mx.bfloat16, mx.float16, zero=True),
    GemvCase(5, 11, 1056, 32, mx.float32, mx.bfloat16),
    GemvCase(7, 33, 640, 128, mx.float32, mx.float32, zero=True),
    GemvCase(8, 19, 1024, 64, mx.float16, mx.bfloat16),
]

# Wide enough for the geometry of large weights; run where that is quick.
LARGE = [GemvCase(2, 2051, 2112, 64), GemvCase(6, 2053, 2560, 32, mx.bfloat16, mx.bfloat16)]

"""Cases of routed experts on GPUs: odd widths, every group size, both activations, shared rows."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.cases_gpu_delta import largest_error
from kernels.matrices import quantized, rows

from turbospark.kernels.gpu.experts import mix_experts
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.target import SharedRows
from turbospark.kernels.weights import Activation, ExpertWeights, Norm, QuantizedWeight

EPS = 3e-2  # large, so that leaving it out shows


@dataclass(frozen=True)
class ExpertCase:
    """Rows, experts, experts a row, C and I, and the forms of the bodies."""

    M: int
    E: int
    top_k: int
    C: int
    inner: int
    group: int = 64
    dtype: mx.Dtype = mx.float32
    scale_dtype: mx.Dtype = mx.float32
    activation: Activation = "silu"
    norm: str = "weight"  # or "plain" or "none"
    has_zero: bool = False
    has_scale: bool = False
    renormalise: bool = True
    has_shared: bool = False

    def __str__(self) -> str:
        size = f"{self.M}x{self.C}-{self.top_k}of{self.E}x{self.inner}-{self.group}"
        form = "-zero" * self.has_zero + "-scale" * self.has_scale + "-shared" * self.has_shared
        return f"{size}-{self.dtype}-{self.activation}{form}".replace("mlx.core.", "")

    def stacked(self, N: int, K: int, seed: int) -> tuple[QuantizedWeight, np.ndarray]:
        """A weight [E, N, K] and its values."""
        options = {"zero": self.has_zero, "scale_dtype": self.scale_dtype, "seed": seed}
        flat, values = quantized(self.E * N, K, 4, self.group, **options)
        parts = [
            None if x is None else mx.unflatten(x, 0, (self.E, N))
            for x in (flat.codes, flat.scales, flat.biases)
        ]
        weight = QuantizedWeight(*parts, 4, self.group, flat.zero)
        return weight, values.reshape(self.E, N, K)

    def matrices(self) -> list[tuple[QuantizedWeight, np.ndarray]]:
        C, inner = self.C, self.inner
        return [self.stacked(inner, C, 3), self.stacked(inner, C, 4), self.stacked(C, inner, 5)]

    def weights(self) -> ExpertWeights:
        gate, up, down = (w for w, _ in self.matrices())
        scale = 1 + rows(1, self.E, seed=6)[0] / 4 if self.has_scale else None
        return ExpertWeights(
            gate, up, down, self.activation, self.top_k, renormalise=self.renormalise, scale=scale
        )

    def x(self) -> mx.array:
        return rows(self.M, self.C, seed=7).astype(self.dtype)

    def norm_value(self) -> Norm | None:
        if self.norm == "none":
            return None
        weight = 1 + rows(1, self.C, seed=8)[0].astype(self.scale_dtype) / 4
        return Norm(weight if self.norm == "weight" else None, EPS)

    def scores(self) -> mx.array:
        """Of which some are equal."""
        return (mx.round(rows(self.M, self.E, seed=9) * 4) / 4).astype(self.dtype)

    def shared(self) -> SharedRows | None:
        if not self.has_shared:
            return None
        made = rows(self.M, self.C + 1, seed=10).astype(self.dtype)
        return mx.contiguous(made[:, 1:] * 9), mx.contiguous(made[:, :1])

    def run(self, target: GpuTarget) -> mx.array:
        experts, norm = self.weights(), self.norm_value()
        return mix_experts(self.x(), norm, self.scores(), experts, self.shared(), target=target)

    def expected(self) -> np.ndarray:
        """[M, C] in float64, row by row and expert by expert."""
        x, norm = _wide(self.x()), self.norm_value()
        if norm is not None:
            x = x / np.sqrt((x**2).mean(1, keepdims=True) + norm.eps)
            x = x * (1 if norm.weight is None else _wide(norm.weight))
        gate, up, down = (values for _, values in self.matrices())
        scores, scale = _wide(self.scores()), self.weights().scale
        made = np.zeros((self.M, self.C))
        for m in range(self.M):
            order = np.argsort(-scores[m], kind="stable")[: self.top_k]
            shares = np.exp(scores[m] - scores[m].max())
            shares = shares / (shares[order].sum() if self.renormalise else shares.sum())
            for e in order:
                weight = shares[e] * (1 if scale is None else _wide(scale)[e])
                hidden = self._act(gate[e] @ x[m]) * (up[e] @ x[m])
                made[m] += weight * (down[e] @ hidden)
        shared = self.shared()
        if shared is not None:
            made += _wide(shared[0]) / (1 + np.exp(-_wide(shared[1])))
        return made

    def _act(self, x: np.ndarray) -> np.ndarray:
        if self.activation == "silu":
            return x / (1 + np.exp(-x))
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def error(self, target: GpuTarget) -> float:
        y = self.run(target)
        assert y.dtype == self.dtype
        return largest_error(y, self.expected())


def _wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


BF16, F16 = mx.bfloat16, mx.float16
CASES = [
    ExpertCase(1, 37, 3, 96, 32, 32, has_shared=True),
    ExpertCase(3, 9, 4, 512, 192, 64, F16, F16, "gelu_tanh", has_scale=True),
    ExpertCase(8, 70, 8, 128, 256, 128, BF16, BF16, renormalise=False),
    ExpertCase(2, 5, 5, 320, 704, 64, BF16, F16, has_zero=True, has_shared=True, norm="plain"),
    ExpertCase(5, 33, 2, 64, 512, 64, mx.float32, BF16, norm="none", has_scale=True),
    ExpertCase(4, 6, 6, 192, 96, 32, F16, mx.float32, has_zero=True, has_shared=True),
    ExpertCase(2, 4, 3, 1056, 32, 32, BF16, BF16, "gelu_tanh", norm="plain"),
]
ROUTES = [(1, 1, 1), (3, 5, 2), (2, 32, 8), (7, 33, 6), (2, 129, 16), (3, 256, 8), (1, 512, 10)]

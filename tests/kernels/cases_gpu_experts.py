"""Cases of layers of routed experts on GPUs: odd widths, every kind of weight, router and gate."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.cases_gpu_delta import largest_error
from kernels.matrices import quantized, rows

from turbospark.kernels.gpu.experts_unit import block_of
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import (
    ClampedSwiGLU,
    ExpertBlock,
    ExpertWeights,
    Norm,
    QuantizedWeight,
    SharedExpertWeights,
    Weight,
)

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
    activation: str = "silu"  # or "gelu_tanh" or "clamped"
    norm: str = "weight"  # or "plain" or "none"
    router: str = "8 bits"  # or "4 bits" or "dense"
    router_bias: bool = False
    has_zero: bool = False
    is_mxfp4: bool = False
    has_bias: bool = False
    has_scale: bool = False
    renormalise: bool = True
    groups: tuple[int, int] | None = None
    shared: int = 0
    """Width of a shared expert."""
    gate: str = ""
    """What its score is made of: as `router`, or empty where it has none."""
    closes: bool = False
    """Both sums are normed, and the stream is scaled."""
    residual: bool = True

    def __str__(self) -> str:
        size = f"{self.M}x{self.C}-{self.top_k}of{self.E}x{self.inner}-{self.group}"
        forms = {
            "zero": self.has_zero,
            "mxfp4": self.is_mxfp4,
            "bias": self.has_bias,
            "scale": self.has_scale,
            "groups": self.groups,
            f"shared{self.shared}": self.shared,
            "closes": self.closes,
        }
        form = "".join(f"-{name}" for name, there in forms.items() if there)
        return f"{size}-{self.dtype}-{self.activation}{form}".replace("mlx.core.", "")

    def codes(self, shape: tuple[int, ...], seed: int, bits: int = 4) -> QuantizedWeight:
        """A weight [..., N, K] of random codes."""
        *stack, K = shape
        if self.is_mxfp4 and bits == 4:
            rng = np.random.default_rng(seed)
            words = rng.integers(0, 1 << 32, (*stack, K // 8), dtype=np.uint32)
            scales = rng.integers(123, 128, (*stack, K // 32), dtype=np.uint8)
            return QuantizedWeight(mx.array(words), mx.array(scales), None, 4, 32, mode="mxfp4")
        options = {"zero": self.has_zero, "scale_dtype": self.scale_dtype, "seed": seed}
        flat, _ = quantized(int(np.prod(stack)), K, bits, self.group, **options)
        parts = [
            None if x is None else mx.reshape(x, (*stack, -1))
            for x in (flat.codes, flat.scales, flat.biases)
        ]
        return QuantizedWeight(*parts, bits, self.group, flat.zero)

    def matrix(self, kind: str, N: int, seed: int) -> Weight:
        """The matrix [N, C] of a router or a gate."""
        if kind == "dense":
            return (rows(N, self.C, seed=seed) * self.C**-0.5).astype(self.scale_dtype)
        return self.codes((N, self.C), seed, int(kind[0]))

    def experts(self) -> ExpertWeights:
        E, C, inner = self.E, self.C, self.inner
        biases = (None, None, None)
        if self.has_bias:
            widths = ((inner, 11), (inner, 12), (C, 13))
            biases = tuple(rows(E, N, seed=seed).astype(self.scale_dtype) for N, seed in widths)
        activation = ClampedSwiGLU(1.7, 0.8) if self.activation == "clamped" else self.activation
        return ExpertWeights(
            self.codes((E, inner, C), 3),
            self.codes((E, inner, C), 4),
            self.codes((E, C, inner), 5),
            activation,
            self.top_k,
            biases,
            self.renormalise,
            1 + rows(1, E, seed=6)[0] / 4 if self.has_scale else None,
        )

    def norm_value(self, seed: int) -> Norm | None:
        if self.norm == "none":
            return None
        weight = 1 + rows(1, self.C, seed=seed)[0].astype(self.scale_dtype) / 4
        return Norm(weight if self.norm == "weight" else None, EPS)

    def block(self) -> ExpertBlock:
        C, J = self.C, self.shared
        norm, shared, posts = self.norm_value(8), None, (None, None, None)
        if self.closes:
            posts = tuple(Norm(1 + rows(1, C, seed=20 + i)[0] / 4, EPS * (i + 1)) for i in range(3))
        if J:
            shared = SharedExpertWeights(
                self.codes((J, C), 14),
                self.codes((J, C), 15),
                self.codes((C, J), 16),
                self.norm_value(17) if self.closes else norm,
                self.matrix(self.gate, 1, 18) if self.gate else None,
                posts[1],
            )
        return ExpertBlock(
            self.matrix(self.router, self.E, 9),
            rows(1, self.E, seed=19)[0].astype(self.scale_dtype) if self.router_bias else None,
            self.norm_value(7) if self.closes else norm,
            norm,
            self.experts(),
            self.groups,
            shared,
            posts[0],
            posts[2],
            mx.array([0.75]) if self.closes else None,
        )

    def x(self) -> mx.array:
        return rows(self.M, self.C, seed=10).astype(self.dtype)

    def run(self, target: GpuTarget) -> mx.array:
        return block_of(self.block(), target)(self.x(), self.residual)

    def scores(self) -> np.ndarray:
        """[M, E] in float64."""
        block, x = self.block(), _wide(self.x())
        made = _normed(x, block.router_norm) @ _wide(block.router).T
        return made + (0 if block.router_bias is None else _wide(block.router_bias))

    def ranks(self) -> np.ndarray:
        """The experts of every row [M, k]."""
        made = []
        for row in self.scores():
            may = np.ones(self.E, bool)
            if self.groups is not None:
                count, kept = self.groups
                best = row.reshape(count, -1).max(1)
                may = np.isin(np.arange(self.E) // (self.E // count), np.argsort(-best)[:kept])
            order = np.argsort(-np.where(may, row, -np.inf), kind="stable")
            made.append(order[: self.top_k])
        return np.array(made)

    def expected(self) -> np.ndarray:
        """[M, C] in float64, row by row and expert by expert."""
        block, x, scores = self.block(), _wide(self.x()), self.scores()
        experts, y = block.experts, _normed(x, block.norm)
        gate, up, down = (_wide(w) for w in (experts.gate, experts.up, experts.down))
        bias = [0 if b is None else _wide(b) for b in experts.biases]
        sums = np.zeros((self.M, self.C))
        for m, order in enumerate(self.ranks()):
            shares = np.exp(scores[m] - scores[m].max())
            is_part = self.renormalise and self.groups is None
            shares = shares / (shares[order].sum() if is_part else shares.sum())
            for e in order:
                b = [0 if isinstance(one, int) else one[e] for one in bias]
                hidden = self._joined(gate[e] @ y[m] + b[0], up[e] @ y[m] + b[1])
                weight = shares[e] * (1 if experts.scale is None else _wide(experts.scale)[e])
                sums[m] += weight * (down[e] @ hidden + b[2])
        if block.shared is not None:
            other, shared = _normed(x, block.shared.norm), block.shared
            hidden = self._joined(other @ _wide(shared.gate).T, other @ _wide(shared.up).T)
            beside = hidden @ _wide(shared.down).T
            if shared.score is not None:
                beside = beside / (1 + np.exp(-other @ _wide(shared.score).T))
            if self.closes:
                both = _normed(sums, block.post_norm) + _normed(beside, shared.post_norm)
                return (x + _normed(both, block.close_norm)) * 0.75
            sums = sums + beside
        return x + sums if self.residual else sums

    def _joined(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        if self.activation == "silu":
            return gate / (1 + np.exp(-gate)) * up
        if self.activation == "gelu_tanh":
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            return 0.5 * gate * (1 + np.tanh(inner)) * up
        gate, up = np.minimum(gate, 0.8), np.clip(up, -0.8, 0.8)
        return (up + 1) * gate / (1 + np.exp(-1.7 * gate))

    def error(self, target: GpuTarget) -> float:
        y = self.run(target)
        assert y.dtype == self.dtype
        return largest_error(y, self.expected())


def _wide(x: Weight) -> np.ndarray:
    return np.array(dequantize_reference(x)).astype(np.float64)


def _normed(x: np.ndarray, norm: Norm | None) -> np.ndarray:
    if norm is None:
        return x
    y = x / np.sqrt((x**2).mean(1, keepdims=True) + norm.eps)
    return y * (1 if norm.weight is None else _wide(norm.weight))


BF16, F16 = mx.bfloat16, mx.float16
CASES = [
    ExpertCase(1, 37, 3, 96, 32, 32, shared=96, gate="8 bits"),
    ExpertCase(
        3, 9, 4, 512, 192, 64, F16, F16, "gelu_tanh", router="4 bits", has_scale=True, closes=True,
        shared=320,
    ),
    ExpertCase(8, 70, 8, 128, 256, 128, BF16, BF16, router="dense", renormalise=False),
    ExpertCase(
        2, 5, 5, 320, 704, 64, BF16, F16, has_zero=True, norm="plain", router="dense", shared=64,
    ),
    ExpertCase(5, 33, 2, 64, 512, 64, mx.float32, BF16, norm="none", has_scale=True),
    ExpertCase(
        4, 6, 6, 192, 96, 32, F16, mx.float32, has_zero=True, shared=64, gate="dense",
        residual=False,
    ),
    ExpertCase(2, 4, 3, 1056, 32, 32, BF16, BF16, "gelu_tanh", norm="plain"),
    ExpertCase(
        3, 40, 4, 96, 160, 32, BF16, BF16, "clamped", router="dense", router_bias=True,
        is_mxfp4=True, has_bias=True,
    ),
    ExpertCase(2, 48, 6, 64, 96, 32, groups=(8, 3), has_scale=True, shared=32, router="dense"),
    ExpertCase(1, 3, 2, 2080, 64, 32, mx.float32, mx.float32, "clamped", is_mxfp4=True),
    ExpertCase(2, 4, 2, 2144, 32, 32, BF16, F16, router="dense", closes=True, shared=64),
]  # fmt: skip
ROUTES = [(1, 1, 1), (3, 5, 2), (2, 32, 8), (7, 33, 6), (2, 129, 16), (3, 256, 8), (1, 512, 10)]

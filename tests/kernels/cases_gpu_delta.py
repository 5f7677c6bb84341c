"""Cases of the delta net on GPUs: sizes of heads, rows of one launch and of three, stacked rows."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernels.cases_delta_net import exact_step, inputs_of, state_of, weights_of

from turbospark.kernels.delta_net import DeltaRows
from turbospark.kernels.gpu.delta_net import delta_net
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.target import DeltaGeometry, DeltaInputs, DeltaState
from turbospark.kernels.weights import DeltaWeights, Norm


@dataclass(frozen=True)
class DeltaCase:
    heads: DeltaGeometry
    T: int
    dtype: mx.Dtype = mx.float32
    weight_dtype: mx.Dtype = mx.float32
    is_stacked: bool = False
    gate: str = "silu"

    def __str__(self) -> str:
        h = self.heads
        size = f"T{self.T}-{h.num_key_heads}:{h.num_value_heads}-{h.key_dim}x{h.value_dim}"
        stacked = "-stacked" * self.is_stacked
        stacked += "-sigmoid" * (self.gate == "sigmoid")
        return f"{size}-{h.taps}-{self.dtype}{stacked}".replace("mlx.core.", "")

    def weights(self) -> DeltaWeights:
        made = weights_of(self.heads)
        conv, rate, bias, scale = (
            x.astype(self.weight_dtype)
            for x in (made.conv, made.log_rate, made.dt_bias, made.norm.weight)
        )
        return DeltaWeights(conv, rate, bias, Norm(scale, 3e-2), self.gate)

    def inputs(self) -> DeltaInputs:
        made = inputs_of(self.heads, self.T)
        parts = [x.astype(self.dtype) for x in (made.qkv, made.z, made.b, made.a)]
        if not self.is_stacked:
            return DeltaInputs(*parts)
        whole, at, columns = mx.concatenate(parts, axis=1), 0, []
        for part in parts:
            columns.append(whole[:, at : at + part.shape[1]])
            at += part.shape[1]
        return DeltaInputs(*columns)

    def run(
        self, target: GpuTarget, *, record: bool = False
    ) -> tuple[mx.array, DeltaState, DeltaRows | None]:
        return delta_net(
            self.inputs(),
            state_of(self.heads),
            self.heads,
            self.weights(),
            record=record,
            target=target,
        )

    def errors(self, target: GpuTarget) -> tuple[float, float]:
        """Of the rows, and of the state, whose tail has to be exact."""
        y, (tail, S), _ = self.run(target)
        assert y.dtype == self.dtype
        found = self.inputs()
        inputs = DeltaInputs(
            *(x.astype(mx.float32) for x in (found.qkv, found.z, found.b, found.a))
        )
        w = self.weights()
        conv, rate, bias, scale = (
            x.astype(mx.float32) for x in (w.conv, w.log_rate, w.dt_bias, w.norm.weight)
        )
        weights = DeltaWeights(conv, rate, bias, Norm(scale, w.norm.eps), w.gate)
        wanted, wanted_tail, wanted_S = exact_step(
            self.heads, weights, inputs, state_of(self.heads)
        )
        tail_error = 0.0 if np.array_equal(np.array(tail), wanted_tail) else np.inf
        return largest_error(y, wanted), max(tail_error, largest_error(S, wanted_S))


def largest_error(got: mx.array, expected: np.ndarray) -> float:
    """Largest difference over the largest number expected."""
    difference = np.abs(np.array(got.astype(mx.float32)).astype(np.float64) - expected)
    return float(difference.max() / np.abs(expected).max())


BOUNDS = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 5e-3}

BF16, F16 = mx.bfloat16, mx.float16
CASES = [
    DeltaCase(DeltaGeometry(3, 6, 12, 5, 4), 1),
    DeltaCase(DeltaGeometry(1, 3, 40, 11, 2), 7, F16, BF16, is_stacked=True),
    DeltaCase(DeltaGeometry(2, 4, 128, 96, 4), 4, BF16, BF16, is_stacked=True),
    DeltaCase(DeltaGeometry(1, 1, 256, 192, 4), 2, F16),
    DeltaCase(DeltaGeometry(2, 2, 24, 33, 5), 19, is_stacked=True),
    DeltaCase(DeltaGeometry(1, 2, 64, 128, 4), 13, BF16, mx.float32),
    DeltaCase(DeltaGeometry(1, 3, 96, 70, 3), 37, F16, F16),
    DeltaCase(DeltaGeometry(2, 4, 128, 96, 4), 4, BF16, BF16, gate="sigmoid"),
    DeltaCase(DeltaGeometry(1, 2, 64, 128, 4), 13, gate="sigmoid"),
]

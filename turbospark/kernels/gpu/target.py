"""The targets metal and cuda: bodies where they carry, MLX's own operations for the rest."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from turbospark.errors import OptionError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.gpu import attention_decode, int4_gemv, rms_norm
from turbospark.kernels.gpu.attention_prefill import attention_prefill
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.quantized_matmul import quantized_matmul_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.target import (
    AddProjected,
    Attend,
    DeltaGeometry,
    DeltaNet,
    Embed,
    HeadGeometry,
    Project,
    Rotate,
    Transform,
)
from turbospark.kernels.weights import Activation, DeltaWeights, Norm, QuantizedWeight, Weight
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

BODIES = ("int4_gemv", "rms_norm", "attention_decode")

Product = Callable[[mx.array, Phase], mx.array]


class GpuKernels:
    """Bodies for 4-bit products, norms and attention of up to eight rows in decode.

    Prefill, wider rows and other weights run MLX's quantized product and fused attention.
    """

    def __init__(self, target: GpuTarget, policy: KernelPolicy) -> None:
        """Bind to a GPU.

        Raises:
            OptionError: the policy disables a body that does not exist.
        """
        disabled = {name.strip() for name in policy.disable_kernels.split(",") if name.strip()}
        unknown = sorted(disabled - set(BODIES))
        if unknown:
            raise OptionError(
                f"disable_kernels names {', '.join(unknown)}; the bodies are {', '.join(BODIES)}"
            )
        self._target = target
        self._enabled = [name for name in BODIES if name not in disabled]

    @property
    def name(self) -> str:
        """The GPU target: metal or cuda."""
        return self._target.name

    def describe(self) -> str:
        """One line for humans: target and bodies."""
        bodies = ", ".join(self._enabled) or "no bodies"
        return f"{self.name}: {bodies}; MLX operations on {mx.default_device()} for the rest"

    def embedding(self, weight: Weight, scale: float) -> Embed | None:
        """None: table rows are looked up by MLX."""
        return None

    def head_norm_rope(
        self,
        heads: HeadGeometry,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None,
        rope: Any,
    ) -> Rotate | None:
        """None: heads are rotated by MLX."""
        return None

    def delta_net(self, heads: DeltaGeometry, weights: DeltaWeights) -> DeltaNet | None:
        """None: recurrent layers run MLX's operations."""
        return None

    def normed_projections(
        self, norm: Norm | None, weights: Sequence[Weight], biases: Sequence[mx.array | None]
    ) -> Project | None:
        """rms-norm (if any), then every projection of the same input."""
        if not self._has_body(weights, norm):
            return None
        products = [self._product(w, bias) for w, bias in zip(weights, biases, strict=True)]

        def run(x: mx.array, phase: Phase) -> tuple[mx.array, ...]:
            y = self._normed(x, norm)
            return tuple(product(y, phase) for product in products)

        return run

    def projected_residual(
        self, weight: Weight, bias: mx.array | None, post_norm: Norm | None
    ) -> AddProjected | None:
        """Compute residual + post_norm(weight @ x + bias)."""
        if not self._has_body([weight], post_norm):
            return None
        product = self._product(weight, bias)

        def run(x: mx.array, residual: mx.array, phase: Phase) -> mx.array:
            return residual + self._normed(product(x, phase), post_norm)

        return run

    def gated_mlp(
        self,
        norm: Norm | None,
        gate: Weight,
        up: Weight,
        down: Weight,
        biases: Sequence[mx.array | None],
        activation: Activation,
        post_norm: Norm | None,
        residual: bool,
    ) -> Transform | None:
        """Compute h + post_norm(down(act(gate y) * up y)), y = norm(h); `h +` if `residual`."""
        weights = (gate, up, down)
        if not self._has_body(weights, norm, post_norm):
            return None
        to_gate, to_up, to_down = (
            self._product(w, bias) for w, bias in zip(weights, biases, strict=True)
        )

        def run(h: mx.array, phase: Phase) -> mx.array:
            y = self._normed(h, norm)
            gated = activate_reference(to_gate(y, phase), activation) * to_up(y, phase)
            out = self._normed(to_down(gated, phase), post_norm)
            return h + out if residual else out

        return run

    def output_head(
        self, norm: Norm | None, weight: Weight, bias: mx.array | None, softcap: float | None
    ) -> Transform | None:
        """float32 logits of the rows given: softcap(weight @ norm(h) + bias)."""
        if not self._has_body([weight], norm):
            return None
        product = self._product(weight, bias, mx.float32)

        def run(h: mx.array, phase: Phase) -> mx.array:
            logits = product(self._normed(h, norm), phase)
            return logits if softcap is None else mx.tanh(logits / softcap) * softcap

        return run

    def attend(
        self, heads: HeadGeometry, scale: float, window: int | None, sinks: mx.array | None
    ) -> Attend | None:
        """Causal attention over a cache; a query sees itself and window - 1 rows before it."""
        has_body = "attention_decode" in self._enabled and attention_decode.takes(heads)

        def run(q: mx.array, cache: Any, phase: Phase) -> mx.array:
            rows = cache.rows()
            if has_body and phase is Phase.DECODE and q.shape[0] <= attention_decode.MAX_ROWS:
                return attention_decode.attention_decode(
                    q, rows, scale, window, sinks, target=self._target
                )
            return attention_prefill(q, rows, scale, window, sinks)

        return run

    def _has_body(self, weights: Sequence[Weight], *norms: Norm | None) -> bool:
        """Whether any part of a unit runs in a body of this target."""
        if "rms_norm" in self._enabled and any(norm is not None for norm in norms):
            return True
        return "int4_gemv" in self._enabled and any(map(int4_gemv.takes, weights))

    def _normed(self, x: mx.array, norm: Norm | None) -> mx.array:
        if norm is None or "rms_norm" not in self._enabled:
            return rms_norm_reference(x, norm)
        return rms_norm.rms_norm(x, norm, target=self._target)

    def _product(
        self, weight: Weight, bias: mx.array | None, dtype: mx.Dtype | None = None
    ) -> Product:
        """A product with a weight: the body for a few rows in decode, MLX's operation else."""
        has_body = "int4_gemv" in self._enabled and int4_gemv.takes(weight)

        def run(x: mx.array, phase: Phase) -> mx.array:
            few = phase is Phase.DECODE and x.shape[0] <= int4_gemv.MAX_ROWS
            if not (has_body and few and isinstance(weight, QuantizedWeight)):
                y = quantized_matmul_reference(x, weight, bias)
                return y if dtype is None else y.astype(dtype)
            y = int4_gemv.int4_gemv(x, weight, dtype=dtype, target=self._target)
            return y if bias is None else y + bias.astype(y.dtype)

        return run

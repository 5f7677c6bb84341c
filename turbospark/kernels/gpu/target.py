"""The targets metal and cuda: bodies where they carry, MLX's own operations for the rest."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from turbospark.errors import OptionError
from turbospark.kernels.block_sparse import IndexGeometry
from turbospark.kernels.gpu import head_norm_rope, latent, product_units
from turbospark.kernels.gpu.attention_units import bind_attention, bind_heads, bind_rotated
from turbospark.kernels.gpu.delta_net import bind_delta_net
from turbospark.kernels.gpu.experts_unit import ExpertUnits
from turbospark.kernels.gpu.head_norm_rope import HeadUnit
from turbospark.kernels.gpu.index_rows import bind_index
from turbospark.kernels.gpu.int4_product import takes
from turbospark.kernels.gpu.int4_rows import int4_rows
from turbospark.kernels.gpu.kernel import GpuTarget, resident
from turbospark.kernels.gpu.latent import LatentUnit
from turbospark.kernels.gpu.latent_unit import bind_latents
from turbospark.kernels.gpu.products import Products
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.gpu.streams import bind_streams
from turbospark.kernels.latent import LatentLayer
from turbospark.kernels.target import (
    AddProjected,
    AppendIndex,
    Attend,
    AttendLatents,
    AttentionLayer,
    Close,
    DeltaGeometry,
    DeltaNet,
    Embed,
    FinishLayer,
    HeadGeometry,
    KernelSet,
    MixExperts,
    MixStreams,
    Project,
    Rotate,
    RotateAttend,
    RunBlock,
    Transform,
)
from turbospark.kernels.weights import (
    Activation,
    DeltaWeights,
    ExpertBlock,
    ExpertWeights,
    Norm,
    StreamWeights,
    Weight,
)
from turbospark.settings import KernelPolicy

BODIES = (
    "int4_mma",
    "int4_gemv",
    "int4_rows",
    "fused_projections",
    "fused_residual",
    "fused_gate_up",
    "fused_head",
    "int4_chain",
    "dense_prefill",
    "scores",
    "rms_norm",
    "head_norm_rope",
    "attention_decode",
    "rotated_attention",
    "latent_attention",
    "delta_net",
    "routed_experts",
    "streams",
    "index_rows",
)
"""What a policy may switch off: bodies, fused forms of products, and the dense wide product."""


class GpuKernels(KernelSet):
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
        self.name, self._target = target.name, target
        self._enabled = [name for name in BODIES if name not in disabled]
        self._products = Products(target, frozenset(self._enabled))
        self._experts = ExpertUnits(
            target,
            self._products.normed,
            dense="dense_prefill" in self._enabled,
            sums=self._products.sums if self._products.leaves_sums else None,
        )

    def describe(self) -> str:
        """One line for humans: target and bodies."""
        bodies = ", ".join(self._enabled) or "no bodies"
        return f"{self.name}: {bodies}; MLX operations on {mx.default_device()} for the rest"

    def embedding(self, weight: Weight, scale: float, norm: Norm | None = None) -> Embed | None:
        """Rows of a table, times `scale`, normed if there is a norm."""
        if "int4_rows" not in self._enabled or not takes(weight):
            return None
        products = self._products

        def run(tokens: mx.array) -> mx.array:
            rows = int4_rows(tokens.astype(mx.int32), weight, scale, target=self._target)
            return products.normed(rows, norm)

        return run

    def head_norm_rope(
        self,
        heads: HeadGeometry,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None,
        rope: Any,
    ) -> Rotate | None:
        """Per-head norms, RoPE on q and k, k and v rows written into the cache."""
        if "head_norm_rope" not in self._enabled or not head_norm_rope.takes(heads):
            return None
        unit = HeadUnit.build(heads, rope, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)
        return bind_heads(unit, self._target)

    def latent_attention(self, layer: LatentLayer) -> AttendLatents | None:
        """Norm and RoPE of latent rows, which go into the cache, then attention over it."""
        if "latent_attention" not in self._enabled or not latent.takes(layer):
            return None
        expand = self._products.single(layer.expand, None)
        return bind_latents(LatentUnit.build(layer), expand, self._target)

    def delta_net(self, heads: DeltaGeometry, weights: DeltaWeights) -> DeltaNet | None:
        """Convolution, norms of the heads, delta rule, gated norm of T rows of one layer."""
        if "delta_net" not in self._enabled:
            return None
        return bind_delta_net(heads, weights, self._target)

    def mix_streams(self, weights: StreamWeights) -> MixStreams | None:
        """Shares of what a block said into the streams, and a mixture of them."""
        inject = [] if weights.inject is None else [weights.inject]
        into = [weights.down, *inject]
        enter = self.normed_projections(None, into, [None] * len(into))
        leave = self.normed_projections(None, [weights.up], [None])
        if not {"rms_norm", "streams"} <= set(self._enabled) or enter is None or leave is None:
            return None
        return bind_streams(weights, enter, leave, self._target)

    def routed_experts(self, norm: Norm | None, experts: ExpertWeights) -> MixExperts | None:
        """Weighted sum of every row's experts over norm(h); plus sigmoid(score) * shared rows."""
        if "routed_experts" not in self._enabled:
            return None
        return self._experts.bind(norm, experts)

    def expert_block(self, block: ExpertBlock) -> RunBlock | None:
        """A router, experts, a shared one and the stream they advance, for a few rows."""
        if "routed_experts" not in self._enabled:
            return None
        return self._experts.bind_block(block)

    def normed_projections(
        self, norm: Norm | None, weights: Sequence[Weight], biases: Sequence[mx.array | None]
    ) -> Project | None:
        """rms-norm (if any), then every projection of the same input."""
        return product_units.bind_projections(self._products, norm, weights, biases)

    def projected_residual(
        self, weight: Weight, bias: mx.array | None, post_norm: Norm | None
    ) -> AddProjected | None:
        """Compute residual + post_norm(weight @ x + bias)."""
        return product_units.bind_residual(self._products, weight, bias, post_norm)

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
        weights, norms = (gate, up, down), (norm, post_norm)
        return product_units.bind_mlp(
            self._products, norms, weights, biases, activation, residual=residual
        )

    def projected_mlp(
        self,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
        norm: Norm | None,
        activation: Activation,
        post_norms: tuple[Norm, Norm] | None,
    ) -> FinishLayer | None:
        """`projected_residual`, then `gated_mlp`: weights of output, gate, up and down."""
        return self._products.chains.bind(weights, biases, norm, activation, post_norms)

    def closing(self, norm: Norm, factor: mx.array) -> Close | None:
        """Compute (residual + norm(y)) * factor, the factor being [1]."""
        if "rms_norm" not in self._enabled:
            return None
        multiple, target = resident(factor.astype(mx.float32)), self._target

        def run(y: mx.array, residual: mx.array) -> mx.array:
            return rms_norm(y, norm, residual, multiple=multiple, target=target)

        return run

    def output_head(
        self, norm: Norm | None, weight: Weight, bias: mx.array | None, softcap: float | None
    ) -> Transform | None:
        """float32 logits of the rows given: softcap(weight @ norm(h) + bias)."""
        return product_units.bind_head(self._products, norm, weight, bias, softcap)

    def attend(
        self, heads: HeadGeometry, scale: float, window: int | None, sinks: mx.array | None
    ) -> Attend | None:
        """Causal attention over a cache; a query sees itself and window - 1 rows before it."""
        target = self._target if "attention_decode" in self._enabled else None
        return bind_attention(heads, scale, window, sinks, target)

    def append_index(self, index: IndexGeometry, norm: Norm, rope: Any) -> AppendIndex | None:
        """Rows of a block index: raw keys, and keys of complete blocks."""
        if "index_rows" not in self._enabled:
            return None
        return bind_index(index, norm, rope, self._target)

    def rotated_attention(self, layer: AttentionLayer) -> RotateAttend | None:
        """`head_norm_rope`, `attend` and the gate's sigmoid as one unit."""
        needed = {"head_norm_rope", "attention_decode", "rotated_attention"}
        if not needed <= set(self._enabled):
            return None
        return bind_rotated(layer, self._target)

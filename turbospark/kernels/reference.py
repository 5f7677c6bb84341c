"""The target of plain MLX operations: it has no bodies, so every unit runs its reference."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from turbospark.kernels.block_sparse import IndexGeometry
from turbospark.kernels.latent import LatentLayer
from turbospark.kernels.target import (
    AddProjected,
    AppendIndex,
    Attend,
    AttendChosen,
    AttendLatents,
    AttentionLayer,
    Close,
    DeltaGeometry,
    DeltaNet,
    Embed,
    FinishLayer,
    HeadGeometry,
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


class ReferenceKernels:
    """Every binder answers None."""

    name = "reference"

    def describe(self) -> str:
        return f"reference: MLX operations on {mx.default_device()}"

    def embedding(self, weight: Weight, scale: float, norm: Norm | None = None) -> Embed | None:
        return None

    def normed_projections(
        self, norm: Norm | None, weights: Sequence[Weight], biases: Sequence[mx.array | None]
    ) -> Project | None:
        return None

    def head_norm_rope(
        self,
        heads: HeadGeometry,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None,
        rope: Any,
    ) -> Rotate | None:
        return None

    def attend(
        self, heads: HeadGeometry, scale: float, window: int | None, sinks: mx.array | None
    ) -> Attend | None:
        return None

    def append_index(self, index: IndexGeometry, norm: Norm, rope: Any) -> AppendIndex | None:
        return None

    def attend_chosen(self, heads: HeadGeometry, scale: float) -> AttendChosen | None:
        return None

    def rotated_attention(self, layer: AttentionLayer) -> RotateAttend | None:
        return None

    def latent_attention(self, layer: LatentLayer) -> AttendLatents | None:
        return None

    def projected_residual(
        self, weight: Weight, bias: mx.array | None, post_norm: Norm | None
    ) -> AddProjected | None:
        return None

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
        return None

    def projected_mlp(
        self,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
        norm: Norm | None,
        activation: Activation,
        post_norms: tuple[Norm, Norm] | None,
    ) -> FinishLayer | None:
        return None

    def delta_net(self, heads: DeltaGeometry, weights: DeltaWeights) -> DeltaNet | None:
        return None

    def mix_streams(self, weights: StreamWeights) -> MixStreams | None:
        return None

    def routed_experts(self, norm: Norm | None, experts: ExpertWeights) -> MixExperts | None:
        return None

    def expert_block(self, block: ExpertBlock) -> RunBlock | None:
        return None

    def closing(self, norm: Norm, factor: mx.array) -> Close | None:
        return None

    def output_head(
        self, norm: Norm | None, weight: Weight, bias: mx.array | None, softcap: float | None
    ) -> Transform | None:
        return None

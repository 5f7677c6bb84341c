"""The host target: C++ kernels on all cores of a CPU."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from turbospark.kernels.host.attention import Attention, ChosenAttention, RotatedHeads
from turbospark.kernels.host.calls import EmbeddingRows, Gated, Head, Projections, ResidualAdd
from turbospark.kernels.host.delta_net import DeltaStep
from turbospark.kernels.host.experts import ExpertMix
from turbospark.kernels.host.library import Host, open_host
from turbospark.kernels.host.products import Products, is_supported
from turbospark.kernels.host.streams import StreamMix
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.target import (
    AddProjected,
    Attend,
    AttendChosen,
    DeltaGeometry,
    DeltaNet,
    Embed,
    HeadGeometry,
    KernelSet,
    MixExperts,
    MixStreams,
    Project,
    Rotate,
    Transform,
)
from turbospark.kernels.weights import (
    Activation,
    DeltaWeights,
    ExpertWeights,
    Norm,
    StreamWeights,
    Weight,
)
from turbospark.settings import KernelPolicy


class HostKernels(KernelSet):
    """Kernel bodies in C++, compiled for this CPU.

    Raises:
        KernelError: they cannot be compiled or loaded here.
    """

    name = "host"

    def __init__(self, policy: KernelPolicy) -> None:
        self._host: Host = open_host(policy)
        self._products = Products(self._host)

    def describe(self) -> str:
        host = self._host
        return f"host: {host.isa}, {host.threads} threads, activations {host.activations}"

    def embedding(self, weight: Weight, scale: float, norm: Norm | None = None) -> Embed | None:
        if not is_supported(weight):
            return None
        rows = EmbeddingRows(self._host, self._products, weight, scale)
        return rows if norm is None else lambda tokens: rms_norm_reference(rows(tokens), norm)

    def normed_projections(
        self, norm: Norm | None, weights: Sequence[Weight], biases: Sequence[mx.array | None]
    ) -> Project | None:
        if not all(map(is_supported, weights)):
            return None
        return Projections(self._host, self._products, norm, weights, biases)

    def head_norm_rope(
        self,
        heads: HeadGeometry,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None,
        rope: Any,
    ) -> Rotate | None:
        return RotatedHeads(self._host, heads, (q_norm, k_norm, v_norm), rope)

    def attend(
        self, heads: HeadGeometry, scale: float, window: int | None, sinks: mx.array | None
    ) -> Attend | None:
        return Attention(self._host, heads, scale, window, sinks)

    def attend_chosen(self, heads: HeadGeometry, scale: float) -> AttendChosen | None:
        return ChosenAttention(self._host, heads, scale)

    def projected_residual(
        self, weight: Weight, bias: mx.array | None, post_norm: Norm | None
    ) -> AddProjected | None:
        if not is_supported(weight):
            return None
        return ResidualAdd(self._host, self._products, weight, bias, post_norm)

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
        weights = [gate, up, down]
        if not all(map(is_supported, weights)):
            return None
        norms = (norm, post_norm)
        return Gated(self._host, self._products, norms, weights, biases, activation, residual)

    def delta_net(self, heads: DeltaGeometry, weights: DeltaWeights) -> DeltaNet | None:
        return DeltaStep(self._host, heads, weights)

    def mix_streams(self, weights: StreamWeights) -> MixStreams | None:
        matrices = [weights.down, weights.up, weights.inject]
        if not all(is_supported(matrix) for matrix in matrices if matrix is not None):
            return None
        return StreamMix(self._host, self._products, weights)

    def routed_experts(self, norm: Norm | None, experts: ExpertWeights) -> MixExperts | None:
        weights = (experts.gate, experts.up, experts.down)
        if not all(is_supported(weight, dimensions=3) for weight in weights):
            return None
        return ExpertMix(self._host, self._products, norm, experts)

    def output_head(
        self, norm: Norm | None, weight: Weight, bias: mx.array | None, softcap: float | None
    ) -> Transform | None:
        if not is_supported(weight):
            return None
        return Head(self._host, self._products, norm, weight, bias, softcap)

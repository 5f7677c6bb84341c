"""Values that kernels take: quantized and dense weights, norms."""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from turbospark.errors import ShapeError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix in MLX's affine layout: value = scale * code + bias, per group along the input.

    Attributes:
        codes: [..., N, K * bits / 32] uint32, low bits first.
        scales: [..., N, K / group_size] float32, float16 or bfloat16; may be negative.
        biases: like scales; None when `zero` says that every bias is exactly -zero * scale.
        bits: bits of one code.
        group_size: values along K that share a scale. Group 16 is not one of MLX's own.
        zero: the code that stands for 0, or None when `biases` holds them.
        mode: "affine", or "mxfp4" (scales uint8 E8M0, no biases).
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    zero: int | None = None
    mode: Literal["affine", "mxfp4"] = "affine"

    def __post_init__(self) -> None:
        words, groups = self.codes.shape[-1], self.scales.shape[-1]
        if words * 32 != groups * self.group_size * self.bits:
            raise ShapeError(
                f"codes {self.codes.shape} and scales {self.scales.shape} do not belong together "
                f"at {self.bits} bits and groups of {self.group_size}"
            )
        if (self.biases is None) != (self.zero is not None or self.mode == "mxfp4"):
            raise ShapeError("a quantized weight has either biases or a zero code")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that the codes stand for: [..., N, K]."""
        return (*self.codes.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases together."""
        biases = 0 if self.biases is None else self.biases.nbytes
        return self.codes.nbytes + self.scales.nbytes + biases


Weight = QuantizedWeight | mx.array
"""A matrix [N, K] (out x in): quantized, or dense float32, float16 or bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """An RMS norm: x / sqrt(mean(x^2) + eps) * weight, in float32.

    Attributes:
        weight: [C] as multiplied (a family's "1 + w" is already folded in), or None for none.
        eps: added to the mean square.
    """

    weight: mx.array | None
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """What a delta-net layer holds beside its projections.

    Attributes:
        conv: [channels, taps, 1], the causal filter of each channel; the last tap is the row's own.
        log_rate: [Hv], the logarithm of the rate at which a head forgets ("A_log").
        dt_bias: [Hv], added to `a` before the softplus.
        norm: of each value head's output.
        gate: what the gate `z` becomes before it multiplies the normed output.
    """

    conv: mx.array
    log_rate: mx.array
    dt_bias: mx.array
    norm: Norm
    gate: "OutputGate" = "silu"


OutputGate = Literal["silu", "sigmoid"]
Activation = Literal["silu", "gelu_tanh", "gelu_erf"]


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """A gate that meets its `up` half: (up + 1) * gate * sigmoid(alpha * gate), both clamped.

    Attributes:
        alpha: steepness of the sigmoid.
        limit: the gate's upper bound (it has no lower one), and the bound of |up|.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The matrices of E gated MLPs, and how a row's k experts are weighed.

    Attributes:
        gate: [E, I, C].
        up: [E, I, C].
        down: [E, C, I].
        activation: of the gates.
        top_k: experts a row.
        biases: of gate and up [E, I], of down [E, C], or None.
        renormalise: make the weights of a row sum to 1; else they are shares among all experts.
        scale: [E], multiplied to the weights of a row, or None.
    """

    gate: Weight
    up: Weight
    down: Weight
    activation: Activation | ClampedSwiGLU
    top_k: int
    biases: tuple[mx.array | None, mx.array | None, mx.array | None] = (None, None, None)
    renormalise: bool = True
    scale: mx.array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpertWeights:
    """A gated MLP beside routed experts: it sees every row and has their activation.

    Attributes:
        gate: [J, C].
        up: [J, C].
        down: [C, J].
        norm: of its input, or None.
        score: [1, C], whose product's sigmoid its output is multiplied by, or None.
        post_norm: of its output, or None.
    """

    gate: Weight
    up: Weight
    down: Weight
    norm: Norm | None
    score: Weight | None = None
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBlock:
    """A whole layer of routed experts, from the residual stream h to what is added to it.

    Attributes:
        router: [E, C], its scores are those of `router_norm(h)`.
        router_bias: [E], or None.
        router_norm: of the router's input, or None.
        norm: of the experts' input, or None.
        experts: their matrices.
        groups: number of groups of neighbours, and how many of them a row's experts may come from;
            the weights of a row are then shares among all experts.
        shared: the MLP beside them, or None.
        post_norm: of the experts' sum, or None.
        close_norm: of that sum and the shared MLP's output together, or None.
        factor: [1], of the stream after all was added, or None.
    """

    router: Weight
    router_bias: mx.array | None
    router_norm: Norm | None
    norm: Norm | None
    experts: ExpertWeights
    groups: tuple[int, int] | None = None
    shared: SharedExpertWeights | None = None
    post_norm: Norm | None = None
    close_norm: Norm | None = None
    factor: mx.array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StreamWeights:
    """What lies between residual streams and a block that reads their mixture.

    Attributes:
        norm: of G * C numbers; each stream of C is normalised by itself.
        down: [rank, G * C].
        up: [G * C, rank].
        inject: [G, G * C], or None where no block follows.
        groups: streams, G.
    """

    norm: Norm
    down: Weight
    up: Weight
    inject: Weight | None
    groups: int

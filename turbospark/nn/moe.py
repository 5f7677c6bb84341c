"""Routed experts: a router picks a few gated MLPs for every row."""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels.activations import gated_reference
from turbospark.kernels.quantized_matmul import compute_dtype, dequantize_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.target import KernelSet
from turbospark.kernels.weights import Activation, ClampedSwiGLU, QuantizedWeight, Weight
from turbospark.nn.linear import Linear, Matrix, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.projections import NormedProjections
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase


class Experts(nn.Module):
    """The weights of E gated MLPs, stacked: gate and up [E, I, C], down [E, C, I].

    With `bias` each has one row of it an expert: [E, I] and [E, C].
    """

    def __init__(
        self, num_experts: int, dims: int, hidden_dims: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = Matrix(num_experts, hidden_dims, dims, bias=bias)
        self.up_proj = Matrix(num_experts, hidden_dims, dims, bias=bias)
        self.down_proj = Matrix(num_experts, dims, hidden_dims, bias=bias)


class Router(nn.Module):
    """Scores of E experts [E, C], and what each expert's weight is multiplied by, if anything."""

    def __init__(self, num_experts: int, norm: RMSNorm, *, expert_scale: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.proj = Linear(norm.weight.shape[0], num_experts)
        if expert_scale:
            self.per_expert_scale = mx.ones((num_experts,))

    @property
    def expert_scale(self) -> mx.array | None:
        """Factors [E] of the experts' weights, or None."""
        return cast("mx.array | None", cast(Any, self).get("per_expert_scale"))


@dataclass(frozen=True, slots=True, eq=False)
class PlainRouter:
    """A router that is a matrix [E, C] of the layer, with or without a bias, and nothing else."""

    norm: RMSNorm
    proj: Linear
    expert_scale: None = None


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """A gated MLP that sees every row, times the sigmoid of one score of the row.

    Attributes:
        mlp: without a residual; its norm is the router's.
        gate: [1, C].
    """

    mlp: MLP
    gate: Linear


class RoutedExperts(Unit):
    """post_norm(sum of w_r * expert_r(norm(h)) over the k experts that the router ranks first).

    The weights are the softmax over all experts, cut to the k largest, divided by their sum
    unless `renormalise` is false, and then multiplied by the experts' own scales. The sum runs in
    rank order; of equal scores the lower expert ranks first. A shared expert is added to the sum.
    """

    def __init__(
        self,
        router: Router | PlainRouter,
        experts: Experts,
        *,
        top_k: int,
        activation: Activation | ClampedSwiGLU,
        norm: RMSNorm,
        renormalise: bool = True,
        post_norm: RMSNorm | None = None,
        shared: SharedExpert | None = None,
    ) -> None:
        self._router, self._experts, self._top_k = router, experts, top_k
        self._activation, self._renormalise = activation, renormalise
        self._norm, self._post_norm, self._shared = norm, post_norm, shared
        gates = [] if shared is None else [shared.gate]
        self._scores = NormedProjections(router.norm, [router.proj, *gates])

    def bind(self, kernels: KernelSet) -> None:
        self._scores.bind(kernels)

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Rows h [T, C] -> [T, C], to be added to h."""
        scores, *gates = self._scores(h, phase)  # [T, E], and [T, 1] of a shared expert
        ids, weights = route_reference(
            scores, self._top_k, self._router.expert_scale, renormalise=self._renormalise
        )
        y = rms_norm_reference(h, self._norm.value)
        out = self._mix(y, ids, weights)
        if self._shared is not None:
            out = out + mx.sigmoid(gates[0]) * self._shared.mlp(h, phase)
        post_norm = self._post_norm
        return out if post_norm is None else rms_norm_reference(out, post_norm.value)

    def _mix(self, y: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        experts, rows = self._experts, y[:, None, None]  # [T, 1, 1, C]
        gate = _project(rows, experts.gate_proj, ids)  # [T, k, 1, I]
        hidden = gated_reference(gate, _project(rows, experts.up_proj, ids), self._activation)
        outs = _project(hidden, experts.down_proj, ids)[:, :, 0]
        total = weights[:, :1] * outs[:, 0]
        for rank in range(1, self._top_k):
            total = total + weights[:, rank : rank + 1] * outs[:, rank]
        return total.astype(y.dtype)


def route_reference(
    scores: mx.array,
    top_k: int,
    expert_scale: mx.array | None = None,
    *,
    renormalise: bool = True,
) -> tuple[mx.array, mx.array]:
    """Rank experts and weigh the first ones.

    Args:
        scores: [T, E].
        top_k: experts a row.
        expert_scale: [E], multiplied after the weights of a row were made to sum to 1.
        renormalise: make them sum to 1; else they are shares among all experts.

    Returns:
        ids [T, k] in rank order, the lower expert first among equals; weights [T, k] float32.
    """
    scores = scores.astype(mx.float32)
    # A stable sort of the negated scores: equal ones stay in the order of their ids.
    ids = mx.argsort(-scores, axis=-1)[:, :top_k]
    shares = mx.take_along_axis(mx.softmax(scores, axis=-1), ids, axis=-1)
    weights = shares / shares.sum(axis=-1, keepdims=True) if renormalise else shares
    return ids, weights if expert_scale is None else weights * expert_scale[ids]


def expert_matmul_reference(
    x: mx.array, w: Weight, ids: mx.array, bias: mx.array | None = None
) -> mx.array:
    """Multiply every row by the matrices of its experts, and add their biases.

    In float32 on a CPU, where a row's result is the same whatever rows stand beside it.

    Args:
        x: [T, 1 or k, 1, K].
        w: [E, N, K], quantized or dense.
        ids: [T, k] experts of each row.
        bias: [E, N], or None.

    Returns:
        [T, k, 1, N].
    """
    dtype = compute_dtype(x)
    y = _expert_products(x.astype(dtype), w, ids)
    return y if bias is None else y + bias.astype(dtype)[ids][:, :, None]


def _project(x: mx.array, matrix: Matrix, ids: mx.array) -> mx.array:
    bias = cast("mx.array | None", cast(Any, matrix).get("bias"))
    return expert_matmul_reference(x, matrix.value, ids, bias)


def _expert_products(x: mx.array, w: Weight, ids: mx.array) -> mx.array:
    dtype = x.dtype
    if not isinstance(w, QuantizedWeight) or w.group_size == 16:  # MLX has no groups of 16
        dense = dequantize_reference(w).astype(dtype)
        return mx.gather_mm(x, dense.swapaxes(-1, -2), rhs_indices=ids)
    if w.mode == "mxfp4":
        return mx.gather_qmm(
            x, w.codes, w.scales, rhs_indices=ids, group_size=32, bits=4, mode="mxfp4"
        )
    scales = w.scales.astype(dtype)
    biases = scales * -float(w.zero or 0) if w.biases is None else w.biases.astype(dtype)
    return mx.gather_qmm(
        x, w.codes, scales, biases, rhs_indices=ids, group_size=w.group_size, bits=w.bits
    )

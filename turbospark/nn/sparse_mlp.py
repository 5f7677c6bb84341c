"""Routed experts and a shared one behind a gate, in place of a dense MLP."""

import mlx.core as mx
import mlx.nn as nn

from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.moe import Experts, PlainRouter, RoutedExperts, SharedExpert
from turbospark.protocols import Phase


class SparseMLP(nn.Module):
    """Experts whose chosen weights sum to 1, and one that sees every row; all with SiLU.

    Args:
        width: of the stream, C.
        num_experts: E.
        top_k: experts that a row is sent to.
        inner: width inside an expert.
        shared_inner: width inside the shared one.
        norm: what every part reads the stream through, which the call then advances; None where
            the call gets rows to read as they are, and gives what the experts say to them.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        top_k: int,
        inner: int,
        shared_inner: int,
        norm: RMSNorm | None,
    ) -> None:
        super().__init__()
        self.gate = Linear(width, num_experts)
        self.experts = Experts(num_experts, width, inner)
        self.shared_expert = MLP(width, shared_inner, norm, activation="silu", residual=False)
        self.shared_expert_gate = Linear(width, 1)
        self.routed = RoutedExperts(
            PlainRouter(norm, self.gate),
            self.experts,
            top_k=top_k,
            activation="silu",
            norm=norm,
            shared=SharedExpert(self.shared_expert, self.shared_expert_gate),
        )
        self._advances = norm is not None

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Advance the stream h [T, C], or give what the experts say to rows h."""
        return self.routed.advance(h, phase) if self._advances else self.routed(h, phase)

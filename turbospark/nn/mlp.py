"""The dense gated MLP of a layer."""

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels.weights import Activation
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.projections import GatedMLP
from turbospark.protocols import Phase


class MLP(nn.Module):
    """Gate, up and down projections, and the unit that runs them between two norms.

    Args:
        dims: of the residual stream, C.
        inner: of the hidden layer.
        norm: of its input, if any; it belongs to the layer.
        activation: of the gate.
        bias: every projection has one.
        post_norm: of its output, where a family has one.
        residual: whether the stream is added to the output.
    """

    def __init__(
        self,
        dims: int,
        inner: int,
        norm: RMSNorm | None,
        *,
        activation: Activation,
        bias: bool = False,
        post_norm: RMSNorm | None = None,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(dims, inner, bias)
        self.up_proj = Linear(dims, inner, bias)
        self.down_proj = Linear(inner, dims, bias)
        self.step = GatedMLP(
            norm,
            self.gate_proj,
            self.up_proj,
            self.down_proj,
            activation=activation,
            post_norm=post_norm,
            residual=residual,
        )

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Advance the stream h [T, C]."""
        return self.step(h, phase)

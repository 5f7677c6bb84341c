"""A layer whose attention and MLP stand between two norms each."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels.weights import Activation
from turbospark.nn.linear import RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.projected_mlp import ProjectedMLP
from turbospark.protocols import Phase


class SandwichLayer(nn.Module):
    """Attention and MLP, each normed before and behind; norms are stored as weight - 1.

    Args:
        dims: of the residual stream, C.
        inner: of the MLP's hidden layer.
        attention: the norm of its input and that of its output -> the layer's attention, which
            makes [T, Hq * D] of h [T, C], a cache and a phase, and has a unit `output` for them.
        activation: of the MLP's gate.
        eps: of the norms before.
        post_eps: of the norms behind.
    """

    def __init__(
        self,
        dims: int,
        inner: int,
        attention: Callable[[RMSNorm, RMSNorm], nn.Module],
        *,
        activation: Activation,
        eps: float,
        post_eps: float,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims, eps, offset=1.0)
        self.post_attention_layernorm = RMSNorm(dims, post_eps, offset=1.0)
        self.pre_feedforward_layernorm = RMSNorm(dims, eps, offset=1.0)
        self.post_feedforward_layernorm = RMSNorm(dims, post_eps, offset=1.0)
        self.self_attn: Any = attention(self.input_layernorm, self.post_attention_layernorm)
        self.mlp = MLP(
            dims,
            inner,
            self.pre_feedforward_layernorm,
            activation=activation,
            post_norm=self.post_feedforward_layernorm,
        )
        self.finish = ProjectedMLP(self.self_attn.output, self.mlp)

    def __call__(self, h: mx.array, cache: Any, phase: Phase) -> mx.array:
        attended = self.self_attn(h, cache, phase)  # [T, Hq * D]
        return self.finish(attended, h, phase)  # [T, C]

"""Activations of gated MLPs."""

import math

import mlx.core as mx

from turbospark.kernels.weights import Activation, ClampedSwiGLU


def activate_reference(x: mx.array, activation: Activation) -> mx.array:
    """Apply an activation element by element.

    silu is x * sigmoid(x); gelu_erf is GELU, gelu_tanh its approximation by a tanh.
    """
    if activation == "silu":
        return x * mx.sigmoid(x)
    if activation == "gelu_erf":
        return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + mx.tanh(inner))


def gated_reference(
    gate: mx.array, up: mx.array, activation: Activation | ClampedSwiGLU
) -> mx.array:
    """Join the halves of a gated MLP's hidden layer, element by element."""
    if not isinstance(activation, ClampedSwiGLU):
        return activate_reference(gate, activation) * up
    gate = mx.minimum(gate, activation.limit)
    up = mx.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate * mx.sigmoid(activation.alpha * gate)

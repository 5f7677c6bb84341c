"""Activations of gated MLPs."""

import math

import mlx.core as mx

from turbospark.kernels.weights import Activation


def activate_reference(x: mx.array, activation: Activation) -> mx.array:
    """Apply an activation element by element.

    silu is x * sigmoid(x); gelu_tanh is the tanh form of GELU.
    """
    if activation == "silu":
        return x * mx.sigmoid(x)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + mx.tanh(inner))

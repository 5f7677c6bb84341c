"""Which device MLX computes on."""

import mlx.core as mx


def on_cpu() -> bool:
    """Whether MLX computes on the CPU here."""
    return mx.default_device() == mx.cpu

"""The target of plain MLX operations: it has no bodies, so every unit runs its reference."""

import mlx.core as mx

from turbospark.kernels.target import KernelSet


class ReferenceKernels(KernelSet):
    """Every binder answers None."""

    name = "reference"

    def describe(self) -> str:
        return f"reference: MLX operations on {mx.default_device()}"

"""The second half of a dense layer as one unit."""

from collections.abc import Callable

import mlx.core as mx

from turbospark.kernels.target import FinishLayer, KernelSet
from turbospark.nn.linear import bias_of
from turbospark.nn.mlp import MLP
from turbospark.nn.projections import ProjectedResidual
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase


class ProjectedMLP(Unit):
    """mlp(output(x, residual)), in one step where a target has a body for it.

    Elsewhere the two run as they are, each with a body of its own or without.

    Args:
        output: adds what a layer's mixer gave to the stream.
        mlp: advances the stream; one step takes in a dense one that has a norm behind it if
            `output` has one, and none if not.
    """

    def __init__(
        self, output: ProjectedResidual, mlp: Callable[[mx.array, Phase], mx.array]
    ) -> None:
        self._output, self._mlp = output, mlp
        self._run: FinishLayer | None = None

    def bind(self, kernels: KernelSet) -> None:
        self._run = self._body(kernels)
        self.body = kernels.name if self._run else "its parts"

    def _body(self, kernels: KernelSet) -> FinishLayer | None:
        if not isinstance(self._mlp, MLP):
            return None
        step, norm = self._mlp.step, self._mlp.step.norm
        first, last = self._output.post_norm, step.post_norm
        if norm is None or not step.residual or (first is None) != (last is None):
            return None
        post_norms = None if first is None or last is None else (first.value, last.value)
        modules = (self._output.projection, *step.parts)
        weights, biases = [m.value for m in modules], [bias_of(m) for m in modules]
        return kernels.projected_mlp(weights, biases, norm.value, step.activation, post_norms)

    def __call__(self, x: mx.array, residual: mx.array, phase: Phase) -> mx.array:
        """Finish a layer whose mixer gave x [T, K], given its stream [T, C]: [T, C]."""
        made = self._run(x, residual, phase) if self._run else None
        return self._mlp(self._output(x, residual, phase), phase) if made is None else made

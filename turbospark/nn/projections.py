"""Fusion units around matrix products. Each composes the kernels' references."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.embedding import embedding_reference
from turbospark.kernels.quantized_matmul import quantized_matmul_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.target import AddProjected, Close, Embed, KernelSet, Project, Transform
from turbospark.kernels.weights import Activation, Norm
from turbospark.nn.linear import Embedding, Linear, Matrix, RMSNorm, bias_of, norm_of
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase

Factor = Callable[[], mx.array]
"""Gives [1], a parameter of the layer."""


class TokenEmbedding(Unit):
    """Rows of a table, times `scale`, normed where a family has a norm for them.

    Attributes:
        stream: dtype of the rows; None for what the table's numbers give.
    """

    stream: mx.Dtype | None = None

    def __init__(self, table: Embedding, scale: float = 1.0, norm: Norm | None = None) -> None:
        self._table, self._scale, self._norm = table, scale, norm
        self._run: Embed | None = None

    def bind(self, kernels: KernelSet) -> None:
        self._run = kernels.embedding(self._table.value, self._scale, self._norm)
        self.body = kernels.name if self._run else Unit.body

    def __call__(self, tokens: mx.array) -> mx.array:
        """Look up tokens [T] int32: [T, C]."""
        rows = self._run(tokens) if self._run else self.reference(tokens)
        return rows if self.stream is None else rows.astype(self.stream)

    def reference(self, tokens: mx.array) -> mx.array:
        rows = embedding_reference(tokens, self._table.value, self._scale)
        return rms_norm_reference(rows, self._norm)


class NormedProjections(Unit):
    """An RMS norm (or none), then every projection of the same input."""

    def __init__(self, norm: RMSNorm | None, projections: Sequence[Linear]) -> None:
        self._norm, self._projections = norm, tuple(projections)
        self._run: Project | None = None

    def bind(self, kernels: KernelSet) -> None:
        weights = [module.value for module in self._projections]
        biases = [bias_of(module) for module in self._projections]
        self._run = kernels.normed_projections(norm_of(self._norm), weights, biases)
        self.body = kernels.name if self._run else Unit.body

    def __call__(self, x: mx.array, phase: Phase) -> tuple[mx.array, ...]:
        """Project x [T, K]: one [T, N] a projection."""
        return self._run(x, phase) if self._run else self.reference(x)

    def reference(self, x: mx.array) -> tuple[mx.array, ...]:
        y = rms_norm_reference(x, norm_of(self._norm))
        return tuple(_project(y, module) for module in self._projections)


class ProjectedResidual(Unit):
    """(residual + post_norm(projection(x))) * factor; norm and factor only where there are any."""

    def __init__(
        self,
        projection: Linear,
        post_norm: RMSNorm | None = None,
        factor: Factor | None = None,
    ) -> None:
        assert factor is None or post_norm is not None
        self.projection, self.post_norm = projection, post_norm
        self._factor = factor
        self._run: AddProjected | None = None
        self._apart: tuple[Project, Close] | None = None

    def bind(self, kernels: KernelSet) -> None:
        weight, bias = self.projection.value, bias_of(self.projection)
        self._run = kernels.projected_residual(weight, bias, norm_of(self.post_norm))
        if self.post_norm is not None and self._factor is not None:
            close = kernels.closing(self.post_norm.value, self._factor())
            project = kernels.normed_projections(None, [weight], [bias]) if close else None
            self._apart = (project, close) if project and close else None
        self.body = kernels.name if self._run or self._apart else Unit.body

    def __call__(self, x: mx.array, residual: mx.array, phase: Phase) -> mx.array:
        """Add the projection of x [T, K] to residual [T, C]: [T, C]."""
        if self._apart is not None:
            project, close = self._apart
            return close(project(x, phase)[0], residual)
        made = self._run(x, residual, phase) if self._run else self._added(x, residual)
        return _times(made, self._factor)

    def reference(self, x: mx.array, residual: mx.array) -> mx.array:
        return _times(self._added(x, residual), self._factor)

    def _added(self, x: mx.array, residual: mx.array) -> mx.array:
        y = _project(x, self.projection)
        return residual + rms_norm_reference(y, norm_of(self.post_norm))


class GatedMLP(Unit):
    """h + post_norm(down(activation(gate(y)) * up(y))) with y = norm(h).

    With `residual=False` it returns what would be added to h.
    """

    def __init__(
        self,
        norm: RMSNorm | None,
        gate: Linear,
        up: Linear,
        down: Linear,
        *,
        activation: Activation,
        post_norm: RMSNorm | None = None,
        residual: bool = True,
    ) -> None:
        self.norm, self.post_norm = norm, post_norm
        self.parts = (gate, up, down)
        self.activation: Activation = activation
        self.residual = residual
        self._run: Transform | None = None

    def bind(self, kernels: KernelSet) -> None:
        gate, up, down = (module.value for module in self.parts)
        self._run = kernels.gated_mlp(
            norm_of(self.norm),
            gate,
            up,
            down,
            [bias_of(module) for module in self.parts],
            self.activation,
            norm_of(self.post_norm),
            self.residual,
        )
        self.body = kernels.name if self._run else Unit.body

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Transform h [T, C]: [T, C]."""
        return self._run(h, phase) if self._run else self.reference(h)

    def reference(self, h: mx.array) -> mx.array:
        gate, up, down = self.parts
        y = rms_norm_reference(h, norm_of(self.norm))
        inner = activate_reference(_project(y, gate), self.activation) * _project(y, up)
        out = _project(inner, down)
        out = rms_norm_reference(out, norm_of(self.post_norm))
        return h + out if self.residual else out


class OutputHead(Unit):
    """float32 logits: the final norm, the head, and a softcap where a family has one.

    Args:
        norm: the final norm, if it is the head's to apply.
        table_or_linear: the head.
        softcap: bound of the logits.
        factor: of the logits before the softcap; it is multiplied into the norm's weight.

    Raises:
        ShapeError: there is a factor and no norm to take it.
    """

    def __init__(
        self,
        norm: RMSNorm | None,
        table_or_linear: Matrix,
        *,
        softcap: float | None = None,
        factor: float = 1.0,
    ) -> None:
        if norm is None and factor != 1.0:
            raise ShapeError(f"a head without a norm cannot multiply its logits by {factor}")
        self._norm, self._matrix, self._softcap = norm, table_or_linear, softcap
        self._factor = factor
        self._run: Transform | None = None

    def bind(self, kernels: KernelSet) -> None:
        weight, bias = self._matrix.value, bias_of(self._matrix)
        self._run = kernels.output_head(self._scaled_norm(), weight, bias, self._softcap)
        self.body = kernels.name if self._run else Unit.body

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Give the logits of h [R, C]: [R, V] float32."""
        return self._run(h, phase) if self._run else self.reference(h)

    def reference(self, h: mx.array) -> mx.array:
        y = rms_norm_reference(h, self._scaled_norm())
        logits = _project(y, self._matrix).astype(mx.float32)
        if self._softcap is None:
            return logits
        return mx.tanh(logits / self._softcap) * self._softcap

    def _scaled_norm(self) -> Norm | None:
        norm = norm_of(self._norm)
        if norm is None or norm.weight is None or self._factor == 1.0:
            return norm
        return Norm(norm.weight.astype(mx.float32) * self._factor, norm.eps)


def _times(x: mx.array, factor: Factor | None) -> mx.array:
    return x if factor is None else x * factor().astype(x.dtype)


def _project(x: mx.array, module: Matrix) -> mx.array:
    return quantized_matmul_reference(x, module.value, bias_of(module))

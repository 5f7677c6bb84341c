"""The gated delta-net layer: projections, and the unit that runs everything between them."""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels import target
from turbospark.kernels.delta_net import (
    CHUNK,
    DeltaRows,
    causal_conv_reference,
    check_delta_weights,
    delta_chunks_reference,
    delta_rule_reference,
    fold_reference,
    gated_norm_reference,
    gates_reference,
    next_tail,
    split_heads_reference,
)
from turbospark.kernels.device import on_cpu
from turbospark.kernels.target import DeltaGeometry, DeltaInputs, DeltaState, KernelSet
from turbospark.kernels.weights import DeltaWeights, OutputGate
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.projections import NormedProjections, ProjectedResidual
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase, RowInputs


class StateStore(Protocol):
    """What the layer asks of a cache."""

    @property
    def state(self) -> DeltaState:
        """The state after the tokens so far."""
        ...

    def advance(self, count: int, state: DeltaState) -> None:
        """Take the state after `count` tokens more."""
        ...


class DeltaNetStep(Unit):
    """Filter, norms of the heads, delta rule and gated norm of T rows.

    Args:
        heads: sizes.
        weights: gives the weights as they are now.
    """

    def __init__(self, heads: DeltaGeometry, weights: Callable[[], DeltaWeights]) -> None:
        self._heads, self._weights = heads, weights
        self._run: target.DeltaNet | None = None

    def bind(self, kernels: KernelSet) -> None:
        weights = self._weights()
        check_delta_weights(self._heads, weights)
        self._run = kernels.delta_net(self._heads, weights)
        self.body = kernels.name if self._run else Unit.body

    def __call__(
        self, inputs: DeltaInputs, cache: StateStore, phase: Phase, *, record: bool = False
    ) -> tuple[mx.array, RowInputs | None]:
        """Fold T rows into the cache's state.

        Args:
            inputs: of T rows.
            cache: advanced by T.
            phase: prefill or decode.
            record: whether the row inputs are returned.

        Returns:
            [T, Hv * Dv], and what can replay fewer rows.
        """
        run = self._run or self.reference
        y, state, rows = run(inputs, cache.state, phase, record)
        cache.advance(inputs.qkv.shape[0], state)
        return y, rows

    def reference(
        self, inputs: DeltaInputs, state: DeltaState, phase: Phase, record: bool
    ) -> tuple[mx.array, DeltaState, RowInputs | None]:
        weights, qkv, tail = self._weights(), inputs.qkv, state[0]
        filtered = causal_conv_reference(qkv, tail, weights.conv)
        q, k, v = split_heads_reference(filtered, self._heads)
        log_decay, beta = gates_reference(inputs.a, inputs.b, weights.log_rate, weights.dt_bias)
        rows = DeltaRows(state, qkv, k, v, mx.exp(log_decay), beta, fold_reference)
        # On a CPU a row's result may not depend on where a chunk of rows begins.
        if phase is Phase.PREFILL and rows.rows >= CHUNK // 4 and not on_cpu():
            y, S = delta_chunks_reference(q, rows, log_decay)
        else:
            y, S = delta_rule_reference(q, rows)
        y = gated_norm_reference(y, inputs.z, weights.norm, weights.gate).astype(qkv.dtype)
        return y, (next_tail(qkv, tail), S), rows if record else None


class Filter(nn.Module):
    """The weight [channels, taps, 1] of a causal filter of each channel."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, taps, 1))


class DeltaNet(nn.Module):
    """One recurrent layer's mixer, from the stream to the stream.

    Args:
        dims: of the residual stream, C.
        heads: sizes.
        norm: of its input, if any; it belongs to the layer.
        eps: of the norm of its heads.
        gate: of its output.
        residual: whether the stream is added to the output.
    """

    def __init__(
        self,
        dims: int,
        heads: DeltaGeometry,
        norm: RMSNorm | None,
        eps: float,
        *,
        gate: OutputGate = "silu",
        residual: bool = True,
    ) -> None:
        super().__init__()
        self._gate: OutputGate = gate
        Hv = heads.num_value_heads
        self.in_proj_qkv = Linear(dims, heads.channels)
        self.in_proj_z = Linear(dims, heads.values)
        self.in_proj_b = Linear(dims, Hv)
        self.in_proj_a = Linear(dims, Hv)
        self.conv1d = Filter(heads.channels, heads.taps)
        self.A_log = mx.zeros((Hv,))
        self.dt_bias = mx.zeros((Hv,))
        self.norm = RMSNorm(heads.value_dim, eps)
        self.out_proj = Linear(heads.values, dims)
        inputs = [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]
        self.project = NormedProjections(norm, inputs)
        self.step = DeltaNetStep(heads, self.weights)
        self.output = ProjectedResidual(self.out_proj) if residual else None
        self.project_output = None if residual else NormedProjections(None, [self.out_proj])

    def weights(self) -> DeltaWeights:
        """What the step needs, as kernels take it."""
        norm = self.norm.value
        return DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias, norm, self._gate)

    def __call__(
        self, h: mx.array, cache: StateStore, phase: Phase, *, record: bool = False
    ) -> tuple[mx.array, RowInputs | None]:
        """Advance the stream h [T, C]; the row inputs come with it where `record` asks."""
        y, rows = self.mix(h, cache, phase, record=record)
        if self.output is not None:
            return self.output(y, h, phase), rows
        assert self.project_output is not None
        return self.project_output(y, phase)[0], rows

    def mix(
        self, h: mx.array, cache: StateStore, phase: Phase, *, record: bool = False
    ) -> tuple[mx.array, RowInputs | None]:
        """What the output projection takes, [T, Hv * Dv], and the row inputs."""
        qkv, z, b, a = self.project(h, phase)  # [T, channels], [T, Hv * Dv], [T, Hv] twice
        return self.step(DeltaInputs(qkv, z, b, a), cache, phase, record=record)

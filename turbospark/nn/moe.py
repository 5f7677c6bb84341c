"""Routed experts: a router picks a few gated MLPs for every row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels.device import on_cpu
from turbospark.kernels.experts import (
    keep_groups_reference,
    mix_experts_reference,
    mix_experts_sorted,
    route_reference,
)
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.target import KernelSet, MixExperts, RunBlock, SharedRows
from turbospark.kernels.weights import (
    Activation,
    ClampedSwiGLU,
    ExpertBlock,
    ExpertWeights,
    SharedExpertWeights,
)
from turbospark.nn.linear import Linear, Matrix, RMSNorm, bias_of, norm_of
from turbospark.nn.mlp import MLP
from turbospark.nn.projections import NormedProjections
from turbospark.nn.unit import Unit, units_of
from turbospark.protocols import Phase


class Experts(nn.Module):
    """The weights of E gated MLPs, stacked: gate and up [E, I, C], down [E, C, I].

    With `bias` each has one row of it an expert: [E, I] and [E, C].
    """

    def __init__(
        self, num_experts: int, dims: int, hidden_dims: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = Matrix(num_experts, hidden_dims, dims, bias=bias)
        self.up_proj = Matrix(num_experts, hidden_dims, dims, bias=bias)
        self.down_proj = Matrix(num_experts, dims, hidden_dims, bias=bias)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts of a row come from the groups with the best scores only.

    Attributes:
        count: of groups; neighbours are one.
        kept: groups that a row's experts may come from.
    """

    count: int
    kept: int


class Router(nn.Module):
    """Scores of E experts [E, C], and what each expert's weight is multiplied by, if anything."""

    groups: None = None

    def __init__(self, num_experts: int, norm: RMSNorm, *, expert_scale: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.proj = Linear(norm.weight.shape[0], num_experts)
        if expert_scale:
            self.per_expert_scale = mx.ones((num_experts,))

    @property
    def expert_scale(self) -> mx.array | None:
        """Factors [E] of the experts' weights, or None."""
        return cast("mx.array | None", cast(Any, self).get("per_expert_scale"))


@dataclass(frozen=True, slots=True, eq=False)
class PlainRouter:
    """A router that is a matrix [E, C] of the layer, with or without a bias.

    Attributes:
        norm: of its input, or None where it comes normed.
        proj: the matrix.
        expert_scale: [E], a constant that the experts' weights are multiplied by, or None.
        groups: which experts a row may be sent to; None where it is all of them.
    """

    norm: RMSNorm | None
    proj: Linear
    expert_scale: mx.array | None = None
    groups: ExpertGroups | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """A gated MLP that sees every row, times the sigmoid of one score of the row if it has a gate.

    Attributes:
        mlp: without a residual; where it has a gate, its norm is the router's.
        gate: [1, C], or None.
    """

    mlp: MLP
    gate: Linear | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Closing:
    """Norms of what a layer adds to the stream.

    Attributes:
        experts: of the experts' sum.
        both: of that and what the shared expert gives, if anything.
        factor: gives [1], which multiplies the stream in the end, if anything does.
    """

    experts: RMSNorm
    both: RMSNorm | None = None
    factor: Callable[[], mx.array] | None = None


class RoutedExperts(Unit):
    """The sum of w_r * expert_r(norm(h)) over the k experts that the router ranks first.

    The weights are the softmax over all experts, cut to the k largest, divided by their sum
    unless `renormalise` is false, and then multiplied by the experts' own scales. The sum runs in
    rank order; of equal scores the lower expert ranks first. A shared expert is added to the sum:
    before its norm if it has a gate, else behind it.

    With a router's groups weights are not made to sum to 1, and a shared expert has no gate.
    """

    def __init__(
        self,
        router: Router | PlainRouter,
        experts: Experts,
        *,
        top_k: int,
        activation: Activation | ClampedSwiGLU,
        norm: RMSNorm | None,
        renormalise: bool = True,
        shared: SharedExpert | None = None,
        closing: Closing | None = None,
    ) -> None:
        has_gate = shared is not None and shared.gate is not None
        assert router.groups is None or not (renormalise or has_gate)
        self._router, self._experts, self._top_k = router, experts, top_k
        self._activation: Activation | ClampedSwiGLU = activation
        self._renormalise = renormalise
        self._norm, self._shared, self._closing = norm, shared, closing
        gates = [] if shared is None or shared.gate is None else [shared.gate]
        self._scores = NormedProjections(router.norm, [router.proj, *gates])
        self._run: MixExperts | None = None
        self._block: RunBlock | None = None

    @property
    def width(self) -> int:
        """Numbers of one row between its experts' matrices."""
        return self._top_k * self._experts.gate_proj.value.shape[1]

    @property
    def experts(self) -> Experts:
        """The module that holds their matrices."""
        return self._experts

    @property
    def share(self) -> float:
        """What part of the experts one row needs."""
        return self._top_k / self._experts.gate_proj.value.shape[0]

    def bind(self, kernels: KernelSet) -> None:
        self._scores.bind(kernels)
        self._run = kernels.routed_experts(norm_of(self._norm), self._weights())
        block = self._whole()
        self._block = None if block is None else kernels.expert_block(block)
        self.body = kernels.name if self._run or self._block else Unit.body

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Rows h [T, C] -> [T, C], to be added to h."""
        made = None if self._block is None else self._block(h, False, phase)
        return self._added(h, phase) if made is None else made

    def advance(self, h: mx.array, phase: Phase) -> mx.array:
        """Advance the stream h [T, C]."""
        made = None if self._block is None else self._block(h, True, phase)
        if made is not None:
            return made
        out, factor = h + self._added(h, phase), self._closing and self._closing.factor
        return out if factor is None else out * factor().astype(h.dtype)

    def _added(self, h: mx.array, phase: Phase) -> mx.array:
        scores, *gates = self._scores(h, phase)  # [T, E], and [T, 1] of a shared expert's gate
        beside = None if self._shared is None else self._shared.mlp(h, phase)
        shared = (beside, gates[0]) if gates and beside is not None else None
        run, groups = self._run or self.reference, self._router.groups
        if groups is None:
            out = run(h, scores, shared, phase)
        else:
            # `run` shares 1 out among the experts it sees, which are not all there are.
            scores, share = keep_groups_reference(scores, groups.count, groups.kept)
            out = (run(h, scores, None, phase) * share).astype(h.dtype)
        closing = self._closing
        if closing is not None:
            out = rms_norm_reference(out, closing.experts.value)
        if beside is not None and shared is None:
            out = beside + out
        if closing is not None and closing.both is not None:
            out = rms_norm_reference(out, closing.both.value)
        return out

    def reference(
        self, h: mx.array, scores: mx.array, shared: SharedRows | None, phase: Phase
    ) -> mx.array:
        experts = self._weights()
        ids, weights = route_reference(
            scores, experts.top_k, experts.scale, renormalise=experts.renormalise
        )
        # Sorting pays for many rows; on a CPU the reference keeps rows apart bit for bit.
        is_sorted = phase is Phase.PREFILL and not on_cpu()
        mix = mix_experts_sorted if is_sorted else mix_experts_reference
        out = mix(rms_norm_reference(h, norm_of(self._norm)), ids, weights, experts)
        return out if shared is None else out + mx.sigmoid(shared[1]) * shared[0]

    def _whole(self) -> ExpertBlock | None:
        """The layer as one value; None where a shared expert is none that bodies know."""
        shared, groups, closing = None, self._router.groups, self._closing
        factor = None if closing is None else closing.factor
        if self._shared is not None:
            shared = _shared_weights(self._shared, self._activation)
            if shared is None:
                return None
        return ExpertBlock(
            self._router.proj.value,
            bias_of(self._router.proj),
            norm_of(self._router.norm),
            norm_of(self._norm),
            self._weights(),
            None if groups is None else (groups.count, groups.kept),
            shared,
            None if closing is None else closing.experts.value,
            None if closing is None else norm_of(closing.both),
            None if factor is None else factor(),
        )

    def _weights(self) -> ExpertWeights:
        experts = self._experts
        return ExpertWeights(
            experts.gate_proj.value,
            experts.up_proj.value,
            experts.down_proj.value,
            self._activation,
            self._top_k,
            (bias_of(experts.gate_proj), bias_of(experts.up_proj), bias_of(experts.down_proj)),
            self._renormalise,
            self._router.expert_scale,
        )


def _shared_weights(
    shared: SharedExpert, activation: Activation | ClampedSwiGLU
) -> SharedExpertWeights | None:
    step = shared.mlp.step
    if step.activation != activation or any(bias_of(part) is not None for part in step.parts):
        return None
    gate, up, down = (part.value for part in step.parts)
    score = None if shared.gate is None else shared.gate.value
    return SharedExpertWeights(gate, up, down, norm_of(step.norm), score, norm_of(step.post_norm))


def expert_shares(model: nn.Module) -> dict[str, float]:
    """What part of a parameter one token needs, for those of routed experts, by their names."""
    parts = {
        id(unit.experts): unit.share
        for _, unit in units_of(model)
        if isinstance(unit, RoutedExperts)
    }
    modules = cast("list[tuple[str, nn.Module]]", model.named_modules())
    owners = {path: parts[id(module)] for path, module in modules if id(module) in parts}
    return {
        f"{path}.{name}": owners[owner]
        for path, module in modules
        if isinstance(module, Matrix) and (owner := path.rpartition(".")[0]) in owners
        for name in cast("dict[str, Any]", module)
    }

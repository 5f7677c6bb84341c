"""The unit of routed experts on a GPU: bodies for a few rows, sorted products for many."""

from collections.abc import Callable

import mlx.core as mx

from turbospark.kernels.experts import mix_experts_sorted
from turbospark.kernels.gpu.experts import experts_route, layouts, mix_experts, takes
from turbospark.kernels.gpu.int4_product import MAX_ROWS
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.target import MixExperts, SharedRows
from turbospark.kernels.weights import ExpertWeights, Norm
from turbospark.protocols import Phase

Normed = Callable[[mx.array, Norm | None], mx.array]


class ExpertUnits:
    """Binds the experts of layers.

    Bodies that cannot be built or launched for some sizes give way to MLX's operations for them,
    and one line in the log says so.

    Args:
        target: where.
        normed: normalises many rows.
    """

    def __init__(self, target: GpuTarget, normed: Normed) -> None:
        self._target, self._normed = target, normed
        self._verdicts: dict[tuple[object, ...], bool] = {}

    def bind(self, norm: Norm, experts: ExpertWeights) -> MixExperts | None:
        """The unit of a layer, or None where no body serves its experts."""
        if not takes(experts):
            return None
        key = (*layouts(experts), experts.activation, experts.top_k)
        if key not in self._verdicts:
            self._verdicts[key] = self._runs(norm, experts)
        return self._run(norm, experts) if self._verdicts[key] else None

    def _run(self, norm: Norm, experts: ExpertWeights) -> MixExperts:
        target = self._target

        def run(h: mx.array, scores: mx.array, shared: SharedRows | None, phase: Phase) -> mx.array:
            if phase is Phase.DECODE and h.shape[0] <= MAX_ROWS:
                return mix_experts(h, norm, scores, experts, shared, target=target)
            ids, weights = experts_route(
                scores, experts.top_k, experts.scale, renormalise=experts.renormalise, target=target
            )
            out = mix_experts_sorted(self._normed(h, norm), ids, weights, experts)
            return out if shared is None else out + mx.sigmoid(shared[1]) * shared[0]

        return run

    def _runs(self, norm: Norm, experts: ExpertWeights) -> bool:
        E, _, C = experts.gate.shape

        def launch() -> mx.array:
            rows, scores = mx.zeros((1, C), mx.bfloat16), mx.zeros((1, E), mx.bfloat16)
            return mix_experts(rows, norm, scores, experts, None, target=self._target)

        return runs("routed_experts", f"{E} of {C} values", launch, self._target)

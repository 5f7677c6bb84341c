"""The units of routed experts on a GPU: bodies for a few rows, sorted products for many."""

import functools
from collections.abc import Callable
from typing import TypedDict

import mlx.core as mx

from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.experts import experts_route, layouts, takes, takes_groups
from turbospark.kernels.gpu.experts_close import closing_numbers, experts_close
from turbospark.kernels.gpu.experts_mix import (
    APART,
    GATED,
    PLAIN,
    experts_down,
    experts_up,
    have_one_root,
    takes_shared,
    up_numbers,
)
from turbospark.kernels.gpu.experts_scores import (
    experts_scores,
    joined_router,
    router_numbers,
    scores_of_sum,
    takes_router,
)
from turbospark.kernels.gpu.experts_wide import WIDE_SHARE, dense_experts, mix_sorted
from turbospark.kernels.gpu.int4_product import FLOATS, MAX_ROWS
from turbospark.kernels.gpu.kernel import GpuTarget, resident
from turbospark.kernels.gpu.step_sums import StepSums, StreamSum
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.target import MixExperts, RunBlock, SharedRows
from turbospark.kernels.weights import ExpertBlock, ExpertWeights, Norm, QuantizedWeight, Weight
from turbospark.protocols import Phase


class _Given(TypedDict):
    target: GpuTarget
    bundle: Bundle


Normed = Callable[[mx.array, Norm | None], mx.array]
FewRows = Callable[[mx.array, bool], mx.array]
"""h of 1 to 8 rows, whether to add it -> [M, C]."""


class ExpertUnits:
    """Binds the experts of layers.

    Bodies that cannot be built or launched for some sizes give way to MLX's operations for them,
    and one line in the log says so.

    Args:
        target: where.
        normed: normalises many rows.
        dense: whether many rows may be multiplied by dequantized matrices.
        sums: of the stream, which a layer of few rows forms as it ranks experts; None where
            nothing leaves any.
    """

    def __init__(
        self,
        target: GpuTarget,
        normed: Normed,
        *,
        dense: bool = False,
        sums: StepSums | None = None,
    ) -> None:
        self._target, self._normed, self._sums = target, normed, sums
        self._is_dense = dense and target.name == "cuda"
        self._verdicts: dict[tuple[object, ...], bool] = {}

    def bind(self, norm: Norm | None, experts: ExpertWeights) -> MixExperts | None:
        """The unit of experts whose scores are given, or None where no body serves them."""
        if not takes(experts):
            return None
        target = self._target

        def few(h: mx.array, scores: mx.array) -> mx.array:
            hidden = experts_up(h, norm, scores.astype(mx.float32), experts, target=target)
            return experts_down(hidden, experts, dtype=h.dtype, target=target)

        @functools.cache
        def serves() -> bool:
            E, _, C = experts.gate.shape
            rows, zeros = mx.zeros((1, C), mx.bfloat16), mx.zeros((1, E))
            return self._serves(_key(norm, experts), experts, lambda: few(rows, zeros))

        def run(h: mx.array, scores: mx.array, shared: SharedRows | None, phase: Phase) -> mx.array:
            if phase is Phase.DECODE and h.shape[0] <= MAX_ROWS and serves():
                out = few(h, scores)
            else:
                ids, weights = experts_route(
                    scores,
                    experts.top_k,
                    experts.scale,
                    renormalise=experts.renormalise,
                    target=target,
                )
                is_wide = self._is_dense and ids.size >= WIDE_SHARE * experts.gate.shape[0]
                out = mix_sorted(
                    self._normed(h, norm),
                    ids,
                    weights,
                    dense_experts(experts) if is_wide else experts,
                    target=target,
                )
            return out if shared is None else out + mx.sigmoid(shared[1]) * shared[0]

        return run

    def bind_block(self, block: ExpertBlock) -> RunBlock | None:
        """The unit of a whole layer, or None where no body serves it."""
        if not takes_block(block):
            return None
        sums, experts = self._sums, block.experts
        few = block_of(block, self._target, sums)
        rows = mx.zeros((1, experts.gate.shape[2]), mx.bfloat16)

        def launch() -> mx.array:
            if sums is None:
                return few(rows, True)
            summed = rows + 1
            sums.put(summed, StreamSum(rows, rows, mx.zeros((rows.shape[1] + 1,))))
            return few(rows, True) + few(summed, True)

        if not self._serves(_block_key(block), experts, launch):
            return None

        def run(h: mx.array, residual: bool, phase: Phase) -> mx.array | None:
            is_few = phase is Phase.DECODE and h.shape[0] <= MAX_ROWS and h.dtype in FLOATS
            is_open = residual or block.close_norm is None
            return few(h, residual) if is_few and is_open else None

        return run

    def _serves(
        self, key: tuple[object, ...], experts: ExpertWeights, launch: Callable[[], mx.array]
    ) -> bool:
        if key not in self._verdicts:
            E, _, C = experts.gate.shape
            self._verdicts[key] = runs("routed_experts", f"{E} of {C} values", launch, self._target)
        return self._verdicts[key]


def takes_block(block: ExpertBlock) -> bool:
    """Whether the bodies serve a whole layer."""
    experts, shared = block.experts, block.shared
    E, top_k = experts.gate.shape[0], experts.top_k
    closing = (block.post_norm, None if shared is None else shared.post_norm, block.close_norm)
    return (
        takes(experts)
        and takes_router(block.router)
        and takes_groups(E, block.groups, top_k)
        and (
            shared is None
            or (takes_shared(experts, shared) and have_one_root(block.norm, shared.norm))
        )
        and (shared is None or shared.score is None or block.router_bias is None)
        and (
            all(norm is not None and norm.weight is not None for norm in closing)
            or (closing == (None, None, None) and block.factor is None)
        )
    )


def block_of(block: ExpertBlock, target: GpuTarget, sums: StepSums | None = None) -> FewRows:
    """Three launches, scores, hidden rows and sum; four where the sums have norms of their own.

    What they read lies in one bundle, into which the experts' matrices move. Rows that are a sum in
    `sums` are formed by the first launch.
    """
    experts, shared, join, close = block.experts, block.shared, join_of(block), _closing(block)
    known = sums or StepSums()
    router = joined_router(block.router, None if shared is None else shared.score)
    factor = resident(mx.ones((1,)) if block.factor is None else block.factor.astype(mx.float32))
    bundle = bundle_of(block, router, factor)
    given: _Given = {"target": target, "bundle": bundle}

    def run(h: mx.array, residual: bool) -> mx.array:
        router_of = (block.router_norm, router, block.router_bias)
        parts = known.parts(h)
        if parts is None:
            h = known.written(h)
            scores = experts_scores(h, *router_of, **given)
        else:
            scores, whole = scores_of_sum(parts, *router_of, **given)
            known.put(h, whole)
            h = whole
        hidden = experts_up(h, block.norm, scores, experts, shared, groups=block.groups, **given)
        added = h if residual and close is None else None
        out = experts_down(hidden, experts, shared, added, join=join, dtype=h.dtype, **given)
        return out if close is None else experts_close(h, out, close, factor, **given)

    return run


def bundle_of(block: ExpertBlock, router: Weight, factor: mx.array | None = None) -> Bundle:
    """All that the launches of a layer read and that never changes."""
    experts, shared, close = block.experts, block.shared, _closing(block)
    small = [router] if shared is None else [router, shared.gate, shared.up, shared.down]
    norms = [block.router_norm, block.norm, None if shared is None else shared.norm]
    copied = [
        *(array for w in small for array in _arrays(w)),
        *(norm.weight for norm in (*norms, *(close or ())) if norm is not None),
        router_numbers(block.router_norm),
        up_numbers(block.norm, experts),
        *((closing_numbers(close), factor) if close else ()),
        *(block.router_bias, experts.scale, *experts.biases),
    ]
    moved = [array for w in (experts.gate, experts.up, experts.down) for array in _arrays(w)]
    return Bundle.of(moved, [array for array in copied if array is not None])


def _arrays(w: Weight) -> list[mx.array]:
    if not isinstance(w, QuantizedWeight):
        return [w]
    return [array for array in (w.codes, w.scales, w.biases) if array is not None]


def join_of(block: ExpertBlock) -> int:
    """How a shared expert joins the sum."""
    if block.close_norm is not None:
        return APART
    return GATED if block.shared is not None and block.shared.score is not None else PLAIN


def _closing(block: ExpertBlock) -> tuple[Norm, Norm, Norm] | None:
    own = None if block.shared is None else block.shared.post_norm
    if block.post_norm is None or own is None or block.close_norm is None:
        return None
    return block.post_norm, own, block.close_norm


def _key(norm: Norm | None, experts: ExpertWeights) -> tuple[object, ...]:
    biases = (None if bias is None else bias.dtype for bias in experts.biases)
    return (*layouts(experts), experts.activation, experts.top_k, *biases, norm is None)


def _block_key(block: ExpertBlock) -> tuple[object, ...]:
    shared = block.shared
    parts = () if shared is None else (shared.gate.shape, shared.score is None)
    router = _form(block.router)
    return ("block", *_key(block.norm, block.experts), router, block.groups, *parts)


def _form(w: Weight) -> object:
    if not isinstance(w, QuantizedWeight):
        return w.dtype
    return w.bits, w.group_size, w.zero, w.scales.dtype

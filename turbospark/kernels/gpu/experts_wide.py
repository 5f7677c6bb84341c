"""Routed experts of many rows on a GPU: products of sorted rows, and one launch to sum them."""

import functools
from dataclasses import replace

import mlx.core as mx

from turbospark.kernels.experts import expert_outputs_sorted, mix_experts_sorted
from turbospark.kernels.gpu.kernel import MAX_ELEMENTS, GpuTarget, Kernel
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.weights import ExpertWeights, QuantizedWeight, Weight

WIDE_SHARE = 2
"""Rows an expert from which matrices are dequantized first: MLX's gathered product on CUDA reads
codes once a row, however rows are sorted."""

JOIN = Kernel("experts_join", ("outs", "places", "weights"), ("y",))
_THREADS = 128


def mix_sorted(
    y: mx.array, ids: mx.array, weights: mx.array, experts: ExpertWeights, *, target: GpuTarget
) -> mx.array:
    """What `mix_experts_sorted` computes, summed up in one launch.

    Args:
        y: [T, C], normed.
        ids: [T, k] experts of each row.
        weights: [T, k].
        experts: their matrices.
        target: where.

    Returns:
        [T, C] like `y`.
    """
    (T, C), k = y.shape, ids.shape[1]
    is_short = T * k * C < MAX_ELEMENTS
    if C % 8 or not is_short or not _serves(C, k, y.dtype, target):
        return mix_experts_sorted(y, ids, weights, experts)
    outs, places = expert_outputs_sorted(y, ids, experts)
    return _joined(outs, places, weights, y.dtype, target)


def _joined(
    outs: mx.array, places: mx.array, weights: mx.array, dtype: mx.Dtype, target: GpuTarget
) -> mx.array:
    C, (T, k) = outs.shape[1], places.shape
    (y,) = JOIN(
        target,
        [outs, places, weights],
        template={"T": dtype, "N": C, "TOP": k},
        grid=(-(-C // (8 * _THREADS)) * _THREADS, T, 1),
        threadgroup=(_THREADS, 1, 1),
        outputs=[((T, C), dtype)],
    )
    return y


@functools.cache
def _serves(C: int, k: int, dtype: mx.Dtype, target: GpuTarget) -> bool:
    """Whether the sum's body runs here, tried once on zeros."""

    def launch() -> mx.array:
        places, weights = mx.zeros((1, k), mx.int32), mx.zeros((1, k))
        return _joined(mx.zeros((k, C), dtype), places, weights, dtype, target)

    return runs("experts_join", f"{k} rows of {C} values", launch, target)


def dense_experts(experts: ExpertWeights) -> ExpertWeights:
    """The same with matrices of numbers, in the dtype of the scales or bfloat16."""
    gate, up, down = (_dense(w) for w in (experts.gate, experts.up, experts.down))
    return replace(experts, gate=gate, up=up, down=down)


def _dense(w: Weight) -> mx.array:
    if not isinstance(w, QuantizedWeight):
        return w
    if w.mode == "mxfp4":
        return mx.dequantize(w.codes, w.scales, group_size=32, bits=4, mode="mxfp4")
    offsets = w.scales * -float(w.zero or 0) if w.biases is None else w.biases
    return mx.dequantize(w.codes, w.scales, offsets, group_size=w.group_size, bits=w.bits)

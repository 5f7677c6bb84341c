"""Routed experts in plain MLX: which ones a row gets, and products with their matrices."""

import mlx.core as mx

from turbospark.kernels.activations import gated_reference
from turbospark.kernels.quantized_matmul import compute_dtype, dequantize_reference
from turbospark.kernels.weights import ExpertWeights, QuantizedWeight, Weight

_NEVER = -1e30


def route_reference(
    scores: mx.array,
    top_k: int,
    expert_scale: mx.array | None = None,
    *,
    renormalise: bool = True,
) -> tuple[mx.array, mx.array]:
    """Rank experts and weigh the first ones.

    Args:
        scores: [T, E].
        top_k: experts a row.
        expert_scale: [E], multiplied after the weights of a row were made to sum to 1.
        renormalise: make them sum to 1; else they are shares among all experts.

    Returns:
        ids [T, k] in rank order, the lower expert first among equals; weights [T, k] float32.
    """
    scores = scores.astype(mx.float32)
    # A stable sort of the negated scores: equal ones stay in the order of their ids.
    ids = mx.argsort(-scores, axis=-1)[:, :top_k]
    shares = mx.take_along_axis(mx.softmax(scores, axis=-1), ids, axis=-1)
    weights = shares / shares.sum(axis=-1, keepdims=True) if renormalise else shares
    return ids, weights if expert_scale is None else weights * expert_scale[ids]


def keep_groups_reference(scores: mx.array, count: int, kept: int) -> tuple[mx.array, mx.array]:
    """Leave each row the groups of experts whose best scores are the highest.

    Args:
        scores: [T, E]; E / count neighbours are a group.
        count: of all groups.
        kept: groups of a row; of equal ones the lower is kept.

    Returns:
        scores with those of other groups so low that they have no share; and [T, 1], the share
        among all experts that the experts left to a row have together.
    """
    scores = scores.astype(mx.float32)
    grouped = mx.unflatten(scores, -1, (count, -1))  # [T, G, E / G]
    order = mx.argsort(-grouped.max(axis=-1), axis=-1)[:, :kept]
    is_kept = (order[:, None, :] == mx.arange(count)[None, :, None]).any(axis=-1)[..., None]
    shares = mx.unflatten(mx.softmax(scores, axis=-1), -1, (count, -1))
    share = mx.where(is_kept, shares, 0.0).sum(axis=(-1, -2))[:, None]
    return mx.flatten(mx.where(is_kept, grouped, _NEVER), -2, -1), share


def mix_experts_reference(
    y: mx.array, ids: mx.array, weights: mx.array, experts: ExpertWeights
) -> mx.array:
    """Sum the experts of every row in rank order.

    Args:
        y: [T, C], normed.
        ids: [T, k] experts of each row.
        weights: [T, k].
        experts: their matrices.

    Returns:
        [T, C] like `y`.
    """
    bias, rows = experts.biases, y[:, None, None]  # [T, 1, 1, C]
    gate = expert_matmul_reference(rows, experts.gate, ids, bias[0])
    up = expert_matmul_reference(rows, experts.up, ids, bias[1])
    hidden = gated_reference(gate, up, experts.activation)  # [T, k, 1, I]
    outs = expert_matmul_reference(hidden, experts.down, ids, bias[2])[:, :, 0]
    total = weights[:, :1] * outs[:, 0]
    for rank in range(1, ids.shape[1]):
        total = total + weights[:, rank : rank + 1] * outs[:, rank]
    return total.astype(y.dtype)


def mix_experts_sorted(
    y: mx.array, ids: mx.array, weights: mx.array, experts: ExpertWeights
) -> mx.array:
    """The same but for rounding, for many rows: those of one expert are multiplied together.

    Args: as in `mix_experts_reference`.
    """
    outs, places = expert_outputs_sorted(y, ids, experts)
    return (weights[..., None] * outs[places]).sum(axis=1).astype(y.dtype)


def expert_outputs_sorted(
    y: mx.array, ids: mx.array, experts: ExpertWeights
) -> tuple[mx.array, mx.array]:
    """What every row's experts make of it: those of one expert are multiplied together.

    Args:
        y: [T, C], normed.
        ids: [T, k] experts of each row.
        experts: their matrices.

    Returns:
        outputs [T * k, C], sorted by expert, and the places of a row's own among them [T, k] int32.
    """
    k, flat, bias = ids.shape[1], mx.flatten(ids), experts.biases
    order = mx.argsort(flat)
    # An axis put in behind the gather would have stride 1, and MLX's grouped product on CUDA takes
    # that stride for the distance of rows.
    owners, rows = flat[order], y[:, None][order // k]  # [T * k], [T * k, 1, C]
    gate = expert_matmul_reference(rows, experts.gate, owners, bias[0], is_sorted=True)
    up = expert_matmul_reference(rows, experts.up, owners, bias[1], is_sorted=True)
    hidden = gated_reference(gate, up, experts.activation)
    outs = expert_matmul_reference(hidden, experts.down, owners, bias[2], is_sorted=True)
    return outs[:, 0], mx.reshape(mx.argsort(order), ids.shape).astype(mx.int32)


def expert_matmul_reference(
    x: mx.array,
    w: Weight,
    ids: mx.array,
    bias: mx.array | None = None,
    *,
    is_sorted: bool = False,
) -> mx.array:
    """Multiply every row by the matrices of its experts, and add their biases.

    In float32 on a CPU, where a row's result is the same whatever rows stand beside it.

    Args:
        x: [T, 1 or k, 1, K], or [n, 1, K] where there are ids [n].
        w: [E, N, K], quantized or dense.
        ids: [T, k] experts of each row, or [n].
        bias: [E, N], or None.
        is_sorted: whether ids [n] never fall.

    Returns:
        [T, k, 1, N], or [n, 1, N].
    """
    dtype = compute_dtype(x)
    y = _products(x.astype(dtype), w, ids, is_sorted)
    return y if bias is None else y + bias.astype(dtype)[ids][..., None, :]


def _products(x: mx.array, w: Weight, ids: mx.array, is_sorted: bool) -> mx.array:
    dtype = x.dtype
    if not isinstance(w, QuantizedWeight) or w.group_size == 16:  # MLX has no groups of 16
        dense = w if isinstance(w, mx.array) else dequantize_reference(w)
        dense = dense.astype(dtype).swapaxes(-1, -2)
        return mx.gather_mm(x, dense, rhs_indices=ids, sorted_indices=is_sorted)
    if w.mode == "mxfp4":
        return mx.gather_qmm(
            x,
            w.codes,
            w.scales,
            rhs_indices=ids,
            group_size=32,
            bits=4,
            mode="mxfp4",
            sorted_indices=is_sorted,
        )
    scales = w.scales.astype(dtype)
    biases = scales * -float(w.zero or 0) if w.biases is None else w.biases.astype(dtype)
    return mx.gather_qmm(
        x,
        w.codes,
        scales,
        biases,
        rhs_indices=ids,
        group_size=w.group_size,
        bits=w.bits,
        sorted_indices=is_sorted,
    )

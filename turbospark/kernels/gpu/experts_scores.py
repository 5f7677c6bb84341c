"""A router's scores of up to eight rows, norm included, in one launch."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.experts import launch
from turbospark.kernels.gpu.experts_geometry import spread
from turbospark.kernels.gpu.int4_product import FLOATS, MAX_ROWS
from turbospark.kernels.gpu.kernel import GpuTarget, constant
from turbospark.kernels.gpu.step_sums import StreamSum
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import Norm, QuantizedWeight, Weight

_FEW_COLUMNS = 264
"""More than this many have threadgroups for twice the multiprocessors of an H200."""


def takes_router(router: Weight) -> bool:
    """Whether the body reads this matrix [N, K]: affine of 4 or 8 bits, or dense."""
    if router.shape[-1] % 8 or len(router.shape) != 2:
        return False
    if not isinstance(router, QuantizedWeight):
        return router.dtype in FLOATS and router.size >= 8
    return (
        router.mode == "affine"
        and router.bits in (4, 8)
        and router.scales.dtype in FLOATS
        and (router.biases is None or router.biases.dtype == router.scales.dtype)
    )


def joined_router(router: Weight, score: Weight | None) -> Weight:
    """The matrix of a router with that of a shared expert's gate below it, a copy.

    In the router's own layout where both have it, else dense float32.
    """
    if score is None:
        return router
    if isinstance(router, QuantizedWeight) and isinstance(score, QuantizedWeight):
        layouts = [
            (w.mode, w.bits, w.group_size, w.zero, w.scales.dtype, w.biases is None)
            for w in (router, score)
        ]
        if layouts[0] == layouts[1]:
            parts = [
                None if a is None or b is None else mx.concatenate([a, b])
                for a, b in (
                    (router.codes, score.codes),
                    (router.scales, score.scales),
                    (router.biases, score.biases),
                )
            ]
            codes, scales, biases = parts
            assert codes is not None
            assert scales is not None
            return QuantizedWeight(
                codes, scales, biases, router.bits, router.group_size, router.zero, router.mode
            )
    if isinstance(router, mx.array) and isinstance(score, mx.array):
        return mx.concatenate([router, score.astype(router.dtype)])
    return mx.concatenate([dequantize_reference(router), dequantize_reference(score)])


def experts_scores(
    x: mx.array,
    norm: Norm | None,
    router: Weight,
    bias: mx.array | None = None,
    *,
    dtype: mx.Dtype = mx.float32,
    target: GpuTarget,
    bundle: Bundle | None = None,
) -> mx.array:
    """Scores [M, N]: router @ norm(x) + bias.

    Args:
        x: [M, K], 1 to 8 rows.
        norm: of x, or None.
        router: [N, K], what `takes_router` accepts.
        bias: [N], or None.
        dtype: of the result.
        target: where.
        bundle: where what never changes lies side by side, if it does.

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    (scores,) = _launch(x, None, norm, router, bias, dtype, target, bundle)
    return scores


def scores_of_sum(
    parts: StreamSum,
    norm: Norm | None,
    router: Weight,
    bias: mx.array | None = None,
    *,
    target: GpuTarget,
    bundle: Bundle | None = None,
) -> tuple[mx.array, mx.array]:
    """Scores [M, N] float32 of rows that are yet to be summed up, and these rows [M, K].

    Args:
        parts: of 1 to 8 rows.
        norm, router, bias, target, bundle: as of `experts_scores`.

    Raises:
        ShapeError: the arrays are outside these bounds.
    """
    scores, whole = _launch(parts.stream, parts, norm, router, bias, mx.float32, target, bundle)
    return scores, whole


def _names(
    x: mx.array, norm: Norm | None, router: Weight, bias: mx.array | None
) -> dict[str, mx.array | str]:
    """What the body reads, checked."""
    N, K = router.shape
    if not takes_router(router) or (bias is not None and bias.shape != (N,)):
        raise ShapeError("experts_scores has no body for this router")
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != K:
        raise ShapeError(
            f"experts_scores takes 1 to {MAX_ROWS} rows of {K} values, not x {x.shape}"
        )
    weight = None if norm is None else norm.weight
    is_quantized = isinstance(router, QuantizedWeight)
    biases = router.biases if is_quantized else None
    return {
        "BITS": str(router.bits if is_quantized else 0),
        "x": x,
        "norm_weight": "x" if weight is None else weight,
        "numbers": router_numbers(norm),
        "matrix": router.codes if is_quantized else router,
        "scales": router.scales if is_quantized else "numbers",
        "biases": ("scales" if is_quantized else "numbers") if biases is None else biases,
        "bias": "numbers" if bias is None else bias,
    }


def _launch(
    x: mx.array,
    parts: StreamSum | None,
    norm: Norm | None,
    router: Weight,
    bias: mx.array | None,
    dtype: mx.Dtype,
    target: GpuTarget,
    bundle: Bundle | None,
) -> list[mx.array]:
    """Scores; of `parts`, whose stream is x, the sum too."""
    names = _names(x, norm, router, bias)
    M, (N, K) = x.shape[0], router.shape
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {"scores": ((M, N), dtype)}
    if parts is None:
        names |= {"SUMS": "0"}
    else:
        branch = parts.branch
        if branch.shape != x.shape or parts.norm.shape[0] < K + 1:
            raise ShapeError(
                f"experts_scores adds no branch {branch.shape} with a norm of "
                f"{parts.norm.shape[0] - 1} factors and an eps to x {x.shape}"
            )
        names |= {"SUMS": "1", "branch": branch, "branch_norm": parts.norm}
        outputs["whole"] = (x.shape, x.dtype)
    steps = -(-K // 256)
    split = spread(steps, 4 if steps <= 16 else 8)
    columns = 1 if N <= _FEW_COLUMNS else 2
    is_quantized = isinstance(router, QuantizedWeight)
    return launch(
        target,
        "experts_scores",
        names,
        outputs,
        template={
            "S": dtype,
            "N": N,
            "K": K,
            "SPLIT": split,
            "STEPS": -(-steps // split),
            "COLUMNS": columns,
            "GROUP": router.group_size if is_quantized else 32,
            "HAS_BIASES": is_quantized and router.biases is not None,
            "ZERO": (router.zero or 0) if is_quantized else 0,
            "NORM": norm is not None,
            "HAS_NORM_WEIGHT": norm is not None and norm.weight is not None,
            "HAS_BIAS": bias is not None,
        },
        grid=(32, -(-N // columns) * split, M),
        threadgroup=(32, split, 1),
        bundle=bundle,
    )


def router_numbers(norm: Norm | None) -> mx.array:
    """What `experts_scores` adds to the mean square."""
    return constant(0.0 if norm is None else norm.eps)

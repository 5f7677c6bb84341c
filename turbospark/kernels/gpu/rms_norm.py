"""RMS normalisation of rows on a GPU; its reference is kernels/rms_norm.py."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant, current_target
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import Norm

_NAMES = ("x", "weight", "residual", "eps", "multiple")
KERNEL = Kernel("rms_norm", _NAMES, ("y",), macros=("WIDE 1",))
NARROW = Kernel("rms_norm_narrow", _NAMES, ("y",), body="rms_norm", macros=("WIDE 0",))

_VALUES = 8  # of a thread, side by side


def rms_norm(
    x: mx.array,
    norm: Norm,
    residual: mx.array | None = None,
    *,
    multiple: mx.array | None = None,
    plus_one: bool = False,
    target: GpuTarget | None = None,
) -> mx.array:
    """Normalise along the last axis: x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    Args:
        x: [..., C], at least one row.
        norm: weight [C], or [G, C] for x [..., G, C], or None; and eps.
        residual: like `x`, added to the result.
        multiple: [1] or more, whose first number is multiplied to all of that.
        plus_one: the weight is a distance from 1.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.

    Returns:
        Like `x`.

    Raises:
        ShapeError: `x` has no rows, or weight or residual have another shape.
    """
    C, groups = _check(x, norm.weight, residual)
    target = target or current_target()
    weight = norm.weight
    if target is None:
        y = _reference(x, norm, residual, plus_one=plus_one)
        return y if multiple is None else (y * multiple[0]).astype(x.dtype)
    threads = 32 * min(8, -(-C // (32 * _VALUES)))
    is_wide = C % _VALUES == 0
    (y,) = (KERNEL if is_wide else NARROW)(
        target,
        [
            x,
            x if weight is None else weight,
            x if residual is None else residual,
            constant(norm.eps),
            constant(norm.eps) if multiple is None else multiple,
        ],
        template={
            "T": x.dtype,
            "D": C,
            "THREADS": threads,
            "PARTS": -(-C // (threads * _VALUES)),
            "GROUPS": groups,
            "HAS_WEIGHT": weight is not None,
            "HAS_RESIDUAL": residual is not None,
            "HAS_MULTIPLE": multiple is not None,
            "ADDED": int(plus_one and weight is not None),
        },
        grid=(x.size // C * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=[(x.shape, x.dtype)],
    )
    return y


def _reference(x: mx.array, norm: Norm, residual: mx.array | None, *, plus_one: bool) -> mx.array:
    weight = norm.weight
    y = rms_norm_reference(x, Norm(None, norm.eps)).astype(mx.float32)
    if weight is not None:
        y = y * (weight.astype(mx.float32) + int(plus_one))
    return (y if residual is None else y + residual).astype(x.dtype)


def _check(x: mx.array, weight: mx.array | None, residual: mx.array | None) -> tuple[int, int]:
    """Width of a row, and how many different weights rows take turns at."""
    if x.ndim == 0 or x.size == 0:
        raise ShapeError(f"rms_norm takes rows, not x {x.shape}")
    C = x.shape[-1]
    if weight is not None and weight.shape not in ((C,), x.shape[-2:]):
        raise ShapeError(f"rms_norm of x {x.shape} takes a weight {(C,)}, not {weight.shape}")
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"rms_norm of x {x.shape} takes no residual {residual.shape}")
    return C, 1 if weight is None or weight.ndim == 1 else weight.shape[0]

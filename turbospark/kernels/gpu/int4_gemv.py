"""Products of up to eight rows with a 4-bit weight."""

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, current_target
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight, Weight

KERNEL = Kernel("int4_gemv", ("x", "codes", "scales", "biases"), ("y",))
MAX_ROWS = 8
GROUP_SIZES = (32, 64, 128)

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def int4_gemv(
    x: mx.array,
    w: QuantizedWeight,
    *,
    dtype: mx.Dtype | None = None,
    target: GpuTarget | None = None,
) -> mx.array:
    """Multiply 1 to 8 rows by a 4-bit weight: x @ dequantize(w).T, accumulated in float32.

    On one target each row's result is the same, bit for bit, whatever rows stand beside it.

    Args:
        x: [M, K] float32, float16 or bfloat16.
        w: [N, K], 4 bits, groups of 32, 64 or 128; whole rows of a buffer, since its codes are
            read two words at a time.
        dtype: of the result; by default that of `x`.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.

    Returns:
        [M, N].

    Raises:
        ShapeError: `x` or `w` is outside these bounds.
    """
    dtype = x.dtype if dtype is None else dtype
    _check(x, w, dtype)
    target = target or current_target()
    if target is None:
        return int4_gemv_reference(x, w, dtype=dtype)
    (M, K), N = x.shape, w.shape[0]
    rows, simdgroups = geometry(M, N, K)
    groups = -(-N // (rows * simdgroups))
    (y,) = KERNEL(
        target,
        [x, w.codes, w.scales, w.scales if w.biases is None else w.biases],
        template={
            "T": dtype,
            "M": M,
            "N": N,
            "K": K,
            "GROUP": w.group_size,
            "HAS_BIASES": w.biases is not None,
            "ZERO": w.zero or 0,
            "WORDS": 2 if K % 512 == 0 else 1,
            "ROWS": rows,
        },
        grid=(32, groups * simdgroups, 1),
        threadgroup=(32, simdgroups, 1),
        outputs=[((M, N), dtype)],
    )
    return y


def int4_gemv_reference(
    x: mx.array, w: QuantizedWeight, *, dtype: mx.Dtype | None = None
) -> mx.array:
    """The same in plain MLX operations: a float32 product with the dequantized weight."""
    y = x.astype(mx.float32) @ dequantize_reference(w).T
    return y.astype(x.dtype if dtype is None else dtype)


def takes(w: Weight) -> bool:
    """Whether `int4_gemv` has a body for this weight."""
    return (
        isinstance(w, QuantizedWeight)
        and w.mode == "affine"
        and w.bits == 4
        and w.group_size in GROUP_SIZES
        and len(w.shape) == 2
        and w.scales.dtype in _FLOATS
    )


def geometry(rows: int, N: int, K: int) -> tuple[int, int]:
    """Columns a SIMD-group makes, and SIMD-groups a threadgroup, for [rows, K] x [N, K].

    Short or few rows of the weight want more threadgroups; many rows of x want fewer registers.
    The figures follow public measurements of other kernels on Apple GPUs.
    """
    if N < 2048 or K <= 2048:
        return (2, 4) if N >= 512 else (1, 4)
    return (4, 8) if rows <= 4 else (2, 8)


def _check(x: mx.array, w: QuantizedWeight, dtype: mx.Dtype) -> None:
    if not takes(w):
        raise ShapeError(
            f"int4_gemv has no body for a {w.bits}-bit {w.mode} weight {tuple(w.shape)} in groups "
            f"of {w.group_size} with {w.scales.dtype} scales"
        )
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != w.shape[1]:
        raise ShapeError(
            f"int4_gemv takes 1 to {MAX_ROWS} rows of {w.shape[1]} values, not x {x.shape}"
        )
    if x.dtype not in _FLOATS or dtype not in _FLOATS:
        raise ShapeError(f"int4_gemv takes floats, not x {x.dtype} and a result {dtype}")

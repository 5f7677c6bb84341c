"""Products of up to eight rows with 4-bit weights, each column summed by one SIMD-group."""

import mlx.core as mx

from turbospark.kernels.gpu.int4_geometry import VectorGeometry, vector_geometry
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import GpuTarget, current_target
from turbospark.kernels.weights import QuantizedWeight


def int4_gemv(
    x: mx.array,
    w: QuantizedWeight,
    *,
    dtype: mx.Dtype | None = None,
    target: GpuTarget | None = None,
) -> mx.array:
    """Multiply 1 to 8 rows by a 4-bit weight: x @ dequantize(w).T, accumulated in float32.

    Args:
        x: [M, K] float32, float16 or bfloat16.
        w: [N, K], 4 bits, groups of 32, 64 or 128.
        dtype: of the result; by default that of `x`.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.

    Returns:
        [M, N].

    Raises:
        ShapeError: `x` or `w` is outside these bounds.
    """
    product = Int4Product((w,), (None,), dtype=dtype)
    return vector_product(product, x, None, target)[0]


def vector_product(
    product: Int4Product,
    x: mx.array,
    residual: mx.array | None,
    target: GpuTarget | None = None,
    geometry: VectorGeometry | None = None,
) -> list[mx.array]:
    """Launch. On one target each row's result is the same bits whatever rows stand beside it.

    Args:
        product: what to compute; codes are whole rows of a buffer, since they are read two words
            at a time.
        x: [M, K] float32, float16 or bfloat16, 1 to 8 rows.
        residual: [M, N] where the product adds one.
        target: where; by default the GPU that MLX computes on, and the reference on a CPU.
        geometry: by default that of the table.

    Returns:
        [M, N] a result.

    Raises:
        ShapeError: the arrays are outside the bounds of the bodies.
    """
    product.check(x, residual)
    target = target or current_target()
    if target is None:
        return product.reference(x, residual)
    cut = geometry or vector_geometry(target.name, product, x.shape[0])
    units = sum(-(-N // cut.rows) for N in product.widths[: product.parts])
    groups = -(-units // cut.simdgroups)
    return product.kernel("int4_gemv")(
        target,
        product.inputs(x, residual),
        template=product.template(x)
        | {
            "GROUP": product.weights[0].group_size,
            "WORDS": cut.words,
            "ROWS": cut.rows,
        },
        grid=(32, groups * cut.simdgroups, 1),
        threadgroup=(32, cut.simdgroups, 1),
        outputs=product.outputs(x),
        bundle=product.bundle,
    )

"""Products of up to eight rows with 4-bit weights on the tensor cores of NVIDIA GPUs."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, bounded
from turbospark.kernels.gpu.step_sums import StreamSum

THREADS = 256
MULTIPROCESSORS = 132  # of a Hopper GPU; more blocks than fit at once wait for their turn
_SHARED_BYTES = 227 << 10  # of a block at most
_MULTIPROCESSOR_BYTES = 228 << 10  # of all its blocks, which cost 1 KiB more each

HELPERS = ("cuda_fragments.h", "cuda_int4.h")
_HALVES = (mx.float16, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a launch is cut up.

    Attributes:
        warps: that share a tile of columns, 1, 2, 4 or 8; with `step`, the order of sums.
        step: groups that a warp takes at a time, 4 or 8.
        stages: steps of a warp in flight, plus one.
        blocks: on one multiprocessor.
        staged: whether x goes through shared memory, which a norm needs.
        tall: 1, or 2 for tiles of 32 columns, which read x half as often.
    """

    warps: int
    step: int
    stages: int
    blocks: int
    staged: bool
    tall: int = 1


def takes(product: Int4Product, x_dtype: mx.Dtype) -> bool:
    """Whether the body multiplies these weights: groups of 64, x in 16 bits, no norm too wide."""
    weight = product.weights[0]
    return (
        weight.group_size == 64
        and x_dtype in _HALVES
        and (product.norm is None or fits(product, 8, Geometry(1, 4, 2, 1, True)))
    )


def int4_mma(
    product: Int4Product,
    x: mx.array,
    residual: mx.array | None,
    target: GpuTarget,
    geometry: Geometry | None = None,
    *,
    zeros: int = 0,
    parts: StreamSum | None = None,
) -> list[mx.array]:
    """Launch. Each row's result is the same, bit for bit, whatever rows stand beside it.

    Args:
        product: what to compute.
        x: [M, K] float16 or bfloat16, 1 to 8 rows.
        residual: [M, N] where the product adds one.
        target: CUDA.
        geometry: by default `choose_geometry`'s.
        zeros: so many int32 zeros, 256 at most, are one more result, for a later launch to count
            in.
        parts: x is their branch, and the product that of their sum, rounded to the dtype of x; one
            more result, the last, is that sum [M, K].

    Raises:
        ShapeError: the arrays are outside the bounds of the bodies.
    """
    product.check(x, residual)
    rows = x.shape[0]
    cut = geometry or choose_geometry(product, rows, summed=parts is not None)
    tiles = sum(-(-N // (16 * cut.tall)) for N in product.widths[: product.parts])
    blocks = min(-(-tiles * cut.warps // 8), MULTIPROCESSORS * cut.blocks)
    kernel = product.kernel("int4_mma", "cuda", HELPERS)
    if cut.blocks == 2:
        kernel = bounded(kernel, THREADS, 2)
    inputs, outputs = product.inputs(x, residual), product.outputs(x)
    if zeros:
        kernel, outputs = _with_zeros(kernel, zeros), [*outputs, ((zeros,), mx.int32)]
    if parts is not None:
        _check_parts(product, x, parts)
        kernel, outputs = _with_sum(kernel), [*outputs, (x.shape, x.dtype)]
        inputs += [parts.stream, parts.norm]
    return kernel(
        target,
        inputs,
        template=product.template(x)
        | {
            "WARPS": cut.warps,
            "STEP": cut.step,
            "STAGES": cut.stages,
            "BLOCKS": cut.blocks,
            "STAGED_X": cut.staged,
            "TALL": cut.tall,
        },
        grid=(blocks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        outputs=outputs,
        bundle=product.bundle,
        shared_bytes=shared_bytes(product, rows, cut),
    )


@functools.cache
def _with_zeros(kernel: Kernel, count: int) -> Kernel:
    return replace(
        kernel,
        name=f"{kernel.name}_zeros",
        outputs=(*kernel.outputs, "zeros"),
        macros=(*kernel.macros, f"ZEROS {count}"),
    )


@functools.cache
def _with_sum(kernel: Kernel) -> Kernel:
    return replace(
        kernel,
        name=f"{kernel.name}_sum",
        inputs=(*kernel.inputs, "stream", "branch_norm"),
        outputs=(*kernel.outputs, "summed"),
        macros=(*kernel.macros, "SUMMED"),
    )


def _check_parts(product: Int4Product, x: mx.array, parts: StreamSum) -> None:
    stream, norm = parts.stream, parts.norm
    if product.norm is None:
        raise ShapeError("int4_mma forms a sum only in front of a norm")
    if stream.shape != x.shape or stream.dtype != x.dtype:
        raise ShapeError(
            f"int4_mma adds a branch {x.shape} {x.dtype} to a stream like it, not {stream.shape} "
            f"{stream.dtype}"
        )
    if norm.dtype != mx.float32 or norm.size <= product.inner:
        raise ShapeError(
            f"int4_mma takes a branch's norm of {product.inner} float32 values and an eps, not "
            f"{norm.shape} {norm.dtype}"
        )


def choose_geometry(product: Int4Product, rows: int, *, summed: bool = False) -> Geometry:
    """The cut for so many rows of x; what orders the sums does not depend on them.

    Args:
        product: what to compute.
        rows: of x.
        summed: whether blocks form the rows, which takes registers.
    """
    steps = -(-product.inner // (64 * 4))
    warps = max(w for w in (1, 2, 4, 8) if w <= max(1, steps))
    for blocks, stages, staged, tall in _cuts(product, rows):
        cut = Geometry(warps, 4, stages, blocks, staged, tall)
        if blocks <= (2 if summed else 3) and fits(product, rows, cut):
            return cut
    return Geometry(warps, 4, 2, 1, False)


def _cuts(product: Int4Product, rows: int) -> Sequence[tuple[int, int, bool, int]]:
    """Blocks, stages, whether x is staged, and tiles' height, the fastest first.

    From sweeps on an H200 over the products of models of 4 to 30 billion parameters.
    """
    if product.parts < len(product.weights):
        is_one = product.inner <= _SHORT_INNER and product.widths[0] > _FEW_PAIRS
        return _PAIR if is_one else ((2, 2, True, 1), *_PAIR)
    if product.norm is None:
        return _PLAIN if rows <= _FEW_ROWS else _PLAIN_ROWS
    cuts = _NORMED if rows <= _FEW_ROWS else _NORMED_ROWS
    return ((2, 2, True, 2), *cuts) if sum(product.widths) > _MANY_COLUMNS else cuts


_SHORT_INNER = 4096
_FEW_PAIRS = 5 * 16 * MULTIPROCESSORS  # columns: five tiles a multiprocessor
_MANY_COLUMNS = 1 << 16
_PAIR = ((1, 3, True, 1), (1, 2, True, 1), (1, 6, False, 1), (1, 4, False, 1))
_NORMED = ((3, 3, True, 1), (2, 3, True, 1), (1, 3, True, 1), (1, 2, True, 1))
_PLAIN = ((2, 2, True, 2), (1, 3, True, 2), (2, 2, False, 2))
_FEW_ROWS = 2
_NORMED_ROWS = ((1, 3, True, 1), (1, 2, True, 1))
_PLAIN_ROWS = ((1, 3, True, 2), (1, 3, True, 1), (2, 2, False, 2))


def shared_bytes(product: Int4Product, rows: int, cut: Geometry) -> int:
    """What a block keeps in shared memory: fetched weights, x, and sums to add up."""
    groups = product.inner // 64
    scale_bytes = product.weights[0].scales.dtype.size if groups % cut.step == 0 else 0
    slices = len(product.weights) // product.parts * cut.tall
    stage = slices * (16 * 32 * cut.step + 2 * 16 * cut.step * scale_bytes)
    x_bytes = rows * (2 * product.inner + 64) if cut.staged else 0
    return 8 * cut.stages * stage + x_bytes + 2 * 8 * slices * 16 * rows * 4


def fits(product: Int4Product, rows: int, cut: Geometry) -> bool:
    """Whether so many blocks have room side by side."""
    return have_room(cut.blocks, shared_bytes(product, rows, cut))


def have_room(blocks: int, needed: int) -> bool:
    """Whether so many blocks of so many bytes of shared memory fit on one multiprocessor."""
    return needed <= _SHARED_BYTES and blocks * (needed + 1024) <= _MULTIPROCESSOR_BYTES

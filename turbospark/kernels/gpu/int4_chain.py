"""The second half of a dense layer in one launch on NVIDIA GPUs: three products, one after another.

Blocks take tiles of all three in order and wait, tile by tile, for the product before; see the body
for why that never hangs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.int4_mma import HELPERS, MULTIPROCESSORS, THREADS, have_room
from turbospark.kernels.gpu.int4_product import ACTIVATIONS, MAX_ROWS, Template, takes
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, bounded, constant
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import Activation, Norm, QuantizedWeight, Weight

COUNTERS = 128
"""Zeros that a launch needs; see the body for their places."""

_WARPS, _STEP = 8, 4
_MOST_BYTES = 40 << 20
_HALVES = (mx.float16, mx.bfloat16)
_ARRAYS = ("codes", "scales", "biases", "bias")
KERNEL = Kernel(
    "int4_chain",
    (
        *("x", "residual", "norm_weight", "first_norm", "last_norm", "numbers", "counters"),
        *(f"{array}{i}" for i in range(4) for array in _ARRAYS),
    ),
    ("y", "scratch"),
    only="cuda",
    macros=("PARTS 1",),
    helpers=("parts.h", *HELPERS),
)
_IN_PAIRS = replace(bounded(KERNEL, THREADS, 2), name="int4_chain_2", body="int4_chain")


@dataclass(frozen=True, slots=True, eq=False)
class Int4Chain:
    """h + last(down(activation(gate y) * up y)); y = norm(h), h = residual + first(output(x)).

    Attributes:
        weights: output [C, K], gate and up [I, C], down [C, I], 4 bits in groups of 64.
        biases: [N] or None, one a weight.
        norm: between output and gate.
        activation: of the gate.
        post_norms: first and last, both with weights, or none.
        bundle: where weights, norm and numbers lie side by side, or None.
    """

    weights: tuple[QuantizedWeight, ...]
    biases: tuple[mx.array | None, ...]
    norm: Norm
    activation: Activation
    post_norms: tuple[Norm, Norm] | None = None
    bundle: Bundle | None = None

    @classmethod
    def build(
        cls,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
        norm: Norm | None,
        activation: Activation,
        post_norms: tuple[Norm, Norm] | None = None,
    ) -> "Int4Chain | None":
        """The chain of output, gate, up and down, or None where the body does not serve them."""
        quantized = [w for w in weights if isinstance(w, QuantizedWeight) and takes(w)]
        layouts = {(w.group_size, w.zero, w.scales.dtype, w.biases is None) for w in quantized}
        offsets = {w.biases.dtype for w in quantized if w.biases is not None}
        if (
            norm is None
            or activation not in ACTIVATIONS
            or len(quantized) < len(weights)
            or len(layouts) > 1
            or quantized[0].group_size != 64
            or not offsets <= {quantized[0].scales.dtype}
            or len({bias.dtype for bias in biases if bias is not None}) > 1
            or any(post.weight is None for post in post_norms or ())
        ):
            return None
        return cls(tuple(quantized), tuple(biases), norm, activation, post_norms)

    def bundled(self) -> Bundle:
        """Its arrays side by side: matrices move there, the rest is copied."""
        moved = [array for w in self.weights for array in (w.codes, w.scales, w.biases)]
        copied = [self.numbers, *self.biases, *self.norm_weights]
        return Bundle.of(
            [array for array in moved if array is not None],
            [array for array in copied if array is not None],
        )

    @property
    def numbers(self) -> mx.array:
        """What the body takes besides arrays of the model."""
        first, last = self.post_norms or (None, None)
        return constant((self.norm.eps, first.eps if first else 0.0, last.eps if last else 0.0))

    @property
    def norm_weights(self) -> list[mx.array | None]:
        """Of the norm between, the first and the last one."""
        return [self.norm.weight, *(norm.weight for norm in self.post_norms or ())]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """K, C and I: values of a row of x, of the stream, and between gate and down."""
        output, gate = self.weights[0].shape, self.weights[1].shape
        return output[1], output[0], gate[0]

    @property
    def nbytes(self) -> int:
        """Bytes that a launch reads of weights."""
        return sum(w.nbytes for w in self.weights)


@dataclass(frozen=True, slots=True)
class ChainGeometry:
    """How a launch is cut up.

    Attributes:
        ring: slices of weights that each warp has in flight or in hand, 2 or more.
        blocks: on one multiprocessor.
        staged_x: whether x goes through shared memory.
        staged_inner: whether what down multiplies does.
        tall: 1, or 2 for tiles of 32 columns of down, which read its rows half as often.
    """

    ring: int
    blocks: int
    staged_x: bool = True
    staged_inner: bool = True
    tall: int = 1


def int4_chain(
    chain: Int4Chain,
    x: mx.array,
    residual: mx.array,
    counters: mx.array,
    target: GpuTarget,
    geometry: ChainGeometry | None = None,
) -> mx.array:
    """Launch: [M, C]. Each row's result is the same, whatever rows stand beside it.

    Args:
        chain: what to compute.
        x: [M, K] float16 or bfloat16, 1 to 8 rows.
        residual: [M, C], of the dtype of x.
        counters: [COUNTERS] int32 zeros that an earlier launch wrote and nobody else reads: this
            one counts in them.
        target: CUDA.
        geometry: by default `choose_geometry`'s.

    Raises:
        ShapeError: the arrays are not those of the chain.
    """
    _check(chain, x, residual, counters)
    (_, C, I), M = chain.sizes, x.shape[0]  # noqa: E741 - the body calls it so
    cut = geometry or choose_geometry(chain, M)
    tiles = (C + I) // 16 + C // (16 * cut.tall)
    notes = (2 * C if chain.post_norms else C) + I
    blocks = min(tiles, MULTIPROCESSORS * cut.blocks)
    kernel = KERNEL if cut.blocks == 1 else _IN_PAIRS
    y, _ = kernel(
        target,
        _inputs(chain, x, residual, counters),
        template=_template(chain, x, cut),
        grid=(blocks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        outputs=[((M, C), x.dtype), ((M * notes,), x.dtype)],
        shared_bytes=shared_bytes(chain, M, cut),
        bundle=chain.bundle,
    )
    return y


def int4_chain_reference(chain: Int4Chain, x: mx.array, residual: mx.array) -> mx.array:
    """The same in plain MLX operations, in float32 throughout."""

    def project(y: mx.array, i: int) -> mx.array:
        bias = chain.biases[i]
        made = y @ dequantize_reference(chain.weights[i]).T
        return made if bias is None else made + bias.astype(mx.float32)

    def normed(y: mx.array, norm: Norm | None) -> mx.array:
        if norm is None:
            return y
        weight = None if norm.weight is None else norm.weight.astype(mx.float32)
        return mx.fast.rms_norm(y, weight, norm.eps)

    first, last = chain.post_norms or (None, None)
    h = residual.astype(mx.float32) + normed(project(x.astype(mx.float32), 0), first)
    y = normed(h, chain.norm)
    inner = activate_reference(project(y, 1), chain.activation) * project(y, 2)
    return (h + normed(project(inner, 3), last)).astype(x.dtype)


def is_faster(chain: Int4Chain) -> bool:
    """Whether one launch beats three: it saves the host two, and reads weights less fast.

    Measured on an H200, whole models at context 16, one launch against three, in one process: 31 MB
    a layer 1.32 and 1.45 ms beside a slow processor, which such a small model waits for (the GPU
    alone would take 0.66 and 0.56); 46 MB 1.95 and 1.80 ms.
    """
    return chain.nbytes <= _MOST_BYTES


def takes_rows(chain: Int4Chain, x: mx.array, residual: mx.array) -> bool:
    """Whether the body multiplies these rows."""
    return (
        x.dtype in _HALVES
        and residual.dtype == x.dtype
        and x.shape[0] <= MAX_ROWS
        and fits(chain, x.shape[0], _SMALLEST)
    )


_SMALLEST = ChainGeometry(2, 1, staged_x=False, staged_inner=False)


def choose_geometry(chain: Int4Chain, rows: int) -> ChainGeometry:
    """The cut for so many rows of x; it does not change the order of sums."""
    tall = 1 if rows < 3 else 2
    for blocks, least, staged_x, staged_inner in (
        (2, 4, True, True), (1, 4, True, True), (1, 4, True, False), (1, 2, False, False),
    ):  # fmt: skip
        cut = ChainGeometry(2, blocks, staged_x, staged_inner, 1 if staged_inner else tall)
        for ring in range(12, least - 1, -1):
            if fits(chain, rows, replace(cut, ring=ring)):
                return replace(cut, ring=ring)
    return _SMALLEST


def shared_bytes(chain: Int4Chain, rows: int, cut: ChainGeometry) -> int:
    """What a block keeps in shared memory: fetched weights, rows of x, sums, and its next tiles."""
    slot = 16 * 32 * _STEP + 2 * 16 * _STEP * chain.weights[0].scales.dtype.size
    sums = 2 * 2 * _WARPS * 16 * rows * 4
    return _WARPS * cut.ring * slot + _x_bytes(chain, rows, cut) + sums + 16


def fits(chain: Int4Chain, rows: int, cut: ChainGeometry) -> bool:
    """Whether so many blocks have room side by side."""
    return have_room(cut.blocks, shared_bytes(chain, rows, cut))


def _x_bytes(chain: Int4Chain, rows: int, cut: ChainGeometry) -> int:
    K, C, I = chain.sizes  # noqa: E741
    widths = [C, *([K] if cut.staged_x else []), *([I] if cut.staged_inner else [])]
    return rows * (2 * max(widths) + 64)


def _template(chain: Int4Chain, x: mx.array, cut: ChainGeometry) -> Template:
    K, C, I = chain.sizes  # noqa: E741
    first = chain.weights[0]
    return {
        "M": x.shape[0],
        "K": K,
        "C": C,
        "I": I,
        "HAS_BIASES": first.biases is not None,
        "ZERO": first.zero or 0,
        "HAS_NORM_WEIGHT": chain.norm.weight is not None,
        "POST_NORMS": chain.post_norms is not None,
        "HAS_BIAS": sum(1 << i for i, bias in enumerate(chain.biases) if bias is not None),
        "ACTIVATION": ACTIVATIONS[chain.activation],
        "RING": cut.ring,
        "STAGED_X": cut.staged_x,
        "STAGED_INNER": cut.staged_inner,
        "TALL": cut.tall,
        "X_BYTES": _x_bytes(chain, x.shape[0], cut),
    }


def _inputs(
    chain: Int4Chain, x: mx.array, residual: mx.array, counters: mx.array
) -> list[mx.array]:
    weights = [x if weight is None else weight for weight in chain.norm_weights]
    arrays = [x, residual, *weights, *[x] * (3 - len(weights)), chain.numbers, counters]
    stand_in = next((bias for bias in chain.biases if bias is not None), x)
    for w, bias in zip(chain.weights, chain.biases, strict=True):
        offsets = w.scales if w.biases is None else w.biases
        arrays += [w.codes, w.scales, offsets, stand_in if bias is None else bias]
    return arrays


def _check(chain: Int4Chain, x: mx.array, residual: mx.array, counters: mx.array) -> None:
    K, C, I = chain.sizes  # noqa: E741
    rows = x.shape[0] if x.ndim == 2 else 0
    shapes = [(C, K), (I, C), (I, C), (C, I)]
    takes = "int4_chain takes"
    given = [tuple(w.shape) for w in chain.weights]
    if given != shapes or not C % 64 == I % 64 == 0:
        raise ShapeError(f"{takes} weights {shapes} of whole groups, not {given}")
    for (N, _), bias in zip(shapes, chain.biases, strict=True):
        if bias is not None and bias.shape != (N,):
            raise ShapeError(f"{takes} a bias {(N,)}, not {bias.shape}")
    if not 1 <= rows <= MAX_ROWS or x.shape != (rows, K):
        raise ShapeError(f"{takes} 1 to {MAX_ROWS} rows of {K} values, not x {x.shape}")
    if residual.shape != (rows, C):
        raise ShapeError(f"{takes} a residual {(rows, C)}, not {residual.shape}")
    if counters.shape != (COUNTERS,):
        raise ShapeError(f"{takes} counters {(COUNTERS,)}, not {counters.shape}")
    if x.dtype not in _HALVES or residual.dtype != x.dtype or counters.dtype != mx.int32:
        raise ShapeError(
            f"{takes} 16-bit floats and int32 counters, not x {x.dtype}, a residual "
            f"{residual.dtype} and counters {counters.dtype}"
        )

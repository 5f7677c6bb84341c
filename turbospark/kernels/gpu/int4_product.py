"""What one launch over 4-bit weights computes, and the arrays and names that its bodies take."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.kernel import Kernel, constant
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import Activation, Norm, QuantizedWeight, Weight

MAX_ROWS = 8
MAX_PARTS = 4
GROUP_SIZES = (32, 64, 128)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)

Template = dict[str, mx.Dtype | int | bool]

ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    "silu": 1,
    "gelu_tanh": 2,
    "gelu_erf": 3,
}


@dataclass(frozen=True, slots=True, eq=False)
class Int4Product:
    """Products of the same rows y = norm(x) with one to four weights, in one launch.

    With an activation there are two weights, gate and up, and one result,
    activation(gate y) * (up y).

    Attributes:
        weights: [N_i, K] each, 4 bits, of one group size and kind of scales.
        biases: [N_i] or None, one a weight.
        norm: of x, or None.
        activation: of a gate, or None.
        softcap: every result v becomes softcap * tanh(v / softcap), or None.
        residual: whether [M, N] is added to the only result.
        dtype: of the results; by default that of x.
        bundle: where weights, norm and numbers lie side by side, or None.
    """

    weights: tuple[QuantizedWeight, ...]
    biases: tuple[mx.array | None, ...]
    norm: Norm | None = None
    activation: Activation | None = None
    softcap: float | None = None
    residual: bool = False
    dtype: mx.Dtype | None = None
    bundle: Bundle | None = None

    @property
    def inner(self) -> int:
        """Values of a row of x."""
        return self.weights[0].shape[1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each weight."""
        return tuple(w.shape[0] for w in self.weights)

    @property
    def parts(self) -> int:
        """Results."""
        return 1 if self.activation else len(self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes that a launch reads of weights."""
        return sum(w.nbytes for w in self.weights)

    def kernel(self, name: str, only: str = "", helpers: tuple[str, ...] = ()) -> Kernel:
        """The kernel of that body for so many weights."""
        is_pair = self.activation is not None
        return kernel_of(name, len(self.weights), is_pair=is_pair, only=only, helpers=helpers)

    def inputs(self, x: mx.array, residual: mx.array | None) -> list[mx.array]:
        """Arrays in the order of the kernel's names; what is absent is stood in for."""
        weight = None if self.norm is None else self.norm.weight
        arrays = [x, x if weight is None else weight, self._numbers()]
        arrays.append(x if residual is None else residual)
        stand_in = next((bias for bias in self.biases if bias is not None), x)
        for w, bias in zip(self.weights, self.biases, strict=True):
            offsets = w.scales if w.biases is None else w.biases
            arrays += [w.codes, w.scales, offsets, stand_in if bias is None else bias]
        return arrays

    def bundled(self) -> "Int4Product":
        """The same with its arrays in a bundle: matrices move there, the rest is copied."""
        moved = [array for w in self.weights for array in (w.codes, w.scales, w.biases)]
        copied = [self._numbers(), *self.biases, None if self.norm is None else self.norm.weight]
        bundle = Bundle.of(
            [array for array in moved if array is not None],
            [array for array in copied if array is not None],
        )
        return replace(self, bundle=bundle)

    def _numbers(self) -> mx.array:
        eps = 0.0 if self.norm is None else self.norm.eps
        return constant((eps, 0.0 if self.softcap is None else self.softcap))

    def outputs(self, x: mx.array) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shapes and dtypes of the results."""
        dtype = self.dtype or x.dtype
        return [((x.shape[0], N), dtype) for N in self.widths[: self.parts]]

    def template(self, x: mx.array) -> Template:
        """What every body takes as template arguments."""
        has_bias = sum(1 << i for i, bias in enumerate(self.biases) if bias is not None)
        first = self.weights[0]
        sizes: Template = {f"N{i}": N for i, N in enumerate(self.widths[: self.parts])}
        return sizes | {
            "T": self.dtype or x.dtype,
            "M": x.shape[0],
            "K": self.inner,
            "HAS_BIASES": first.biases is not None,
            "ZERO": first.zero or 0,
            "NORM": self.norm is not None,
            "HAS_NORM_WEIGHT": self.norm is not None and self.norm.weight is not None,
            "HAS_BIAS": has_bias,
            "RESIDUAL": self.residual,
            "ACTIVATION": ACTIVATIONS[self.activation],
            "SOFTCAP": self.softcap is not None,
        }

    def check(self, x: mx.array, residual: mx.array | None) -> None:
        """Refuse what no body takes.

        Raises:
            ShapeError: the weights, `x` or `residual` are outside the bounds of the bodies.
        """
        for w in self.weights:
            if not takes(w):
                raise ShapeError(
                    f"int4_gemv has no body for a {w.bits}-bit {w.mode} weight {tuple(w.shape)} in "
                    f"groups of {w.group_size} with {w.scales.dtype} scales"
                )
        if not are_alike(self.weights) or len(self.weights) > MAX_PARTS:
            raise ShapeError(
                f"int4_gemv takes up to {MAX_PARTS} weights of one layout and K in a launch, not "
                f"{[tuple(w.shape) for w in self.weights]}"
            )
        if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != self.inner:
            raise ShapeError(
                f"int4_gemv takes 1 to {MAX_ROWS} rows of {self.inner} values, not x {x.shape}"
            )
        if x.dtype not in FLOATS or (self.dtype or x.dtype) not in FLOATS:
            raise ShapeError(f"int4_gemv takes floats, not x {x.dtype} and a result {self.dtype}")
        wanted = (x.shape[0], self.widths[0])
        if self.residual and (residual is None or residual.shape != wanted):
            given = None if residual is None else residual.shape
            raise ShapeError(f"int4_gemv adds a residual {wanted}, not {given}")
        for N, bias in zip(self.widths, self.biases, strict=True):
            if bias is not None and bias.shape != (N,):
                raise ShapeError(f"int4_gemv of {N} columns takes a bias {(N,)}, not {bias.shape}")

    def reference(self, x: mx.array, residual: mx.array | None) -> list[mx.array]:
        """The same in plain MLX operations, in float32 throughout."""
        y = x.astype(mx.float32)
        if self.norm is not None:
            weight = self.norm.weight
            wide = None if weight is None else weight.astype(mx.float32)
            y = mx.fast.rms_norm(y, wide, self.norm.eps)
        made = [
            y @ dequantize_reference(w).T + (0.0 if bias is None else bias.astype(mx.float32))
            for w, bias in zip(self.weights, self.biases, strict=True)
        ]
        if self.activation is not None:
            made = [activate_reference(made[0], self.activation) * made[1]]
        if self.softcap is not None:
            made = [mx.tanh(v / self.softcap) * self.softcap for v in made]
        if self.residual and residual is not None:
            made = [made[0] + residual.astype(mx.float32)]
        return [v.astype(self.dtype or x.dtype) for v in made]


def takes(w: Weight) -> TypeGuard[QuantizedWeight]:
    """Whether a body reads this weight."""
    return (
        isinstance(w, QuantizedWeight)
        and w.mode == "affine"
        and w.bits == 4
        and w.group_size in GROUP_SIZES
        and len(w.shape) == 2
        and w.scales.dtype in FLOATS
        and w.scales.size >= 8  # smaller arrays lie in another address space on Metal
    )


def are_alike(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether one launch can read all of these."""
    first = weights[0]
    return all(
        (w.shape[1], w.group_size, w.zero, w.scales.dtype, w.biases is None)
        == (first.shape[1], first.group_size, first.zero, first.scales.dtype, first.biases is None)
        for w in weights
    ) and all(w.biases is None or w.biases.dtype == w.scales.dtype for w in weights)


@functools.cache
def kernel_of(
    name: str,
    count: int,
    *,
    is_pair: bool = False,
    only: str = "",
    helpers: tuple[str, ...] = (),
) -> Kernel:
    """The kernel of a body for so many weights: results of their own, or one of a pair."""
    arrays = ("codes", "scales", "biases", "bias")
    weights = [f"{array}{i}" for i in range(count) for array in arrays]
    parts = 1 if is_pair else count
    return Kernel(
        f"{name}_{'pair' if is_pair else count}",
        ("x", "norm_weight", "numbers", "residual", *weights),
        tuple(f"y{i}" for i in range(parts)),
        only=only,
        body=name,
        macros=(f"PARTS {parts}", *(["PAIR"] if is_pair else [])),
        helpers=("parts.h", *helpers),
    )

"""Products with weights as units need them: fused bodies first, MLX's operations last."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from turbospark.kernels.gpu import int4_mma, rms_norm
from turbospark.kernels.gpu.int4_gemv import vector_product
from turbospark.kernels.gpu.int4_product import (
    ACTIVATIONS,
    MAX_PARTS,
    MAX_ROWS,
    Int4Product,
    are_alike,
    takes,
)
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.quantized_matmul import quantized_matmul_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import Activation, Norm, QuantizedWeight, Weight
from turbospark.protocols import Phase

Launch = Callable[[Int4Product, mx.array, mx.array | None, GpuTarget], list[mx.array]]
Fused = Callable[[mx.array, mx.array | None, Phase], list[mx.array] | None]
"""x, residual -> results, or None where no body serves these rows."""

DENSE_ROWS = {"cuda": 256}
"""Rows of a prefill from which a dense product with the dequantized weight is faster."""

_BODIES: dict[str, Launch] = {"int4_mma": int4_mma.int4_mma, "int4_gemv": vector_product}
_OWNERS = {"int4_mma": "cuda", "int4_gemv": ""}


class Products:
    """Bodies for products of a few rows on one GPU, and what runs for the rest.

    A body that cannot be built or launched for some sizes gives way to the next one for them, and
    one line in the log says so.
    """

    def __init__(self, target: GpuTarget, enabled: frozenset[str]) -> None:
        self._target, self._enabled = target, enabled
        self._bodies = [
            name for name, own in _OWNERS.items() if name in enabled and own in ("", target.own)
        ]
        self._verdicts: dict[tuple[object, ...], bool] = {}

    def has_body(self, weights: Sequence[Weight], *norms: Norm | None) -> bool:
        """Whether any part of a unit runs in a body of this target."""
        if "rms_norm" in self._enabled and any(norm is not None for norm in norms):
            return True
        if "dense_prefill" in self._enabled and self._target.name in DENSE_ROWS:
            return any(isinstance(w, QuantizedWeight) for w in weights)
        return bool(self._bodies) and any(map(takes, weights))

    def normed(self, x: mx.array, norm: Norm | None) -> mx.array:
        """Normalise rows, if there is a norm."""
        if norm is None or "rms_norm" not in self._enabled:
            return rms_norm_reference(x, norm)
        return rms_norm.rms_norm(x, norm, target=self._target)

    def fused(
        self,
        form: str | None,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        softcap: float | None = None,
        residual: bool = False,
        dtype: mx.Dtype | None = None,
    ) -> Fused | None:
        """One launch for a form, or None if it has none.

        Args:
            form: what the policy calls it; None for a plain product.
            weights: one to four.
            biases: one a weight.
            norm, activation, softcap, residual, dtype: as in `Int4Product`.
        """
        quantized = [w for w in weights if isinstance(w, QuantizedWeight) and takes(w)]
        widths = {w.shape[0] for w in weights}
        if (
            (form is not None and form not in self._enabled)
            or not self._bodies
            or len(quantized) < len(weights)
            or len(weights) > MAX_PARTS
            or not are_alike(quantized)
            or (activation is not None and len(widths) > 1)
            or activation not in ACTIVATIONS
            or len({bias.dtype for bias in biases if bias is not None}) > 1
        ):
            return None
        product = Int4Product(
            tuple(quantized), tuple(biases), norm, activation, softcap, residual, dtype
        )

        if form is not None:
            product = product.bundled()
            self._body(product, mx.zeros((1, product.inner), quantized[0].scales.dtype))

        def run(x: mx.array, added: mx.array | None, phase: Phase) -> list[mx.array] | None:
            if phase is not Phase.DECODE or x.shape[0] > MAX_ROWS:
                return None
            if added is not None and added.dtype != x.dtype:
                return None
            name = self._body(product, x)
            return None if name is None else _BODIES[name](product, x, added, self._target)

        return run

    def single(
        self, weight: Weight, bias: mx.array | None, dtype: mx.Dtype | None = None
    ) -> Callable[[mx.array, Phase], mx.array]:
        """A product with one weight: a body for a few rows in decode, MLX's operations else."""
        body = self.fused(None, [weight], [bias], dtype=dtype)

        def run(x: mx.array, phase: Phase) -> mx.array:
            made = None if body is None else body(x, None, phase)
            if made is not None:
                return made[0]
            y = self._wide(x, weight, bias)
            return y if dtype is None else y.astype(dtype)

        return run

    def _wide(self, x: mx.array, weight: Weight, bias: mx.array | None) -> mx.array:
        least = DENSE_ROWS.get(self._target.name)
        if (
            least is None
            or x.shape[0] < least
            or "dense_prefill" not in self._enabled
            or not isinstance(weight, QuantizedWeight)
            or weight.mode != "affine"
            or weight.group_size not in (32, 64, 128)
        ):
            return quantized_matmul_reference(x, weight, bias)
        scales = weight.scales.astype(x.dtype)
        offsets = scales * -float(weight.zero or 0) if weight.biases is None else weight.biases
        dense = mx.dequantize(
            weight.codes,
            scales,
            offsets.astype(x.dtype),
            group_size=weight.group_size,
            bits=weight.bits,
        )
        y = x @ dense.T
        return y if bias is None else y + bias.astype(x.dtype)

    def _body(self, product: Int4Product, x: mx.array) -> str | None:
        """The first body that serves; each is built and tried once for every size."""
        for name in self._bodies:
            if name == "int4_mma" and not int4_mma.takes(product, x.dtype):
                if int4_mma.takes(replace(product, norm=None), x.dtype):
                    return None  # a norm launched before it costs less than the next body
                continue
            types = tuple(bias.dtype for bias in product.biases if bias is not None)
            weight = None if product.norm is None else product.norm.weight
            key = (
                name,
                x.dtype,
                product.widths,
                product.weights[0].scales.dtype,
                types,
                None if weight is None else weight.dtype,
                *product.template(x).items(),
            )
            if key not in self._verdicts:
                self._verdicts[key] = self._runs(name, product, x)
            if self._verdicts[key]:
                return name
        return None

    def _runs(self, name: str, product: Int4Product, x: mx.array) -> bool:
        def launch() -> list[mx.array]:
            zeros = mx.zeros(x.shape, x.dtype)
            added = mx.zeros((x.shape[0], product.widths[0]), x.dtype) if product.residual else None
            return _BODIES[name](product, zeros, added, self._target)

        sizes = f"{'+'.join(map(str, product.widths))} columns of {product.inner} values"
        return runs(name, sizes, launch, self._target, instead="the next kernel does")

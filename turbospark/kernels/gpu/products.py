"""Products with weights as units need them: fused bodies first, MLX's operations last."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from turbospark.kernels.gpu import dense_prefill, int4_mma, rms_norm
from turbospark.kernels.gpu.chain_unit import ChainUnits
from turbospark.kernels.gpu.experts_scores import experts_scores, takes_router
from turbospark.kernels.gpu.int4_chain import COUNTERS
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
from turbospark.kernels.gpu.step_sums import StepSums, StreamSum, factors_of
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import Activation, Norm, QuantizedWeight, Weight
from turbospark.protocols import Phase

Fused = Callable[[mx.array, mx.array | None, Phase], list[mx.array] | None]
"""x, residual -> results, or None where no body serves these rows."""

MOST_SCORES = 1 << 21
"""Values of a weight that is not in 4 bits and yet has a body of its own."""

_OWNERS = {"int4_mma": "cuda", "int4_gemv": ""}


class Products:
    """Bodies for products of a few rows on one GPU, and what runs for the rest.

    A body that cannot be built or launched for some sizes gives way to the next one for them, and
    one line in the log says so.

    Attributes:
        chains: the units that take in several products.
        sums: of the stream and normed branches, which products may form as they read them.
    """

    def __init__(self, target: GpuTarget, enabled: frozenset[str]) -> None:
        self._target, self._enabled = target, enabled
        self._bodies = [
            name for name, own in _OWNERS.items() if name in enabled and own in ("", target.own)
        ]
        self._verdicts: dict[tuple[object, ...], bool] = {}
        self.chains = ChainUnits(target, enabled)
        self.sums = StepSums()

    def has_body(self, weights: Sequence[Weight], *norms: Norm | None) -> bool:
        """Whether any part of a unit runs in a body of this target."""
        if "rms_norm" in self._enabled and any(norm is not None for norm in norms):
            return True
        if "dense_prefill" in self._enabled and self._target.name in dense_prefill.DENSE_ROWS:
            return any(isinstance(w, QuantizedWeight) for w in weights)
        if any(map(self._is_scored, weights)):
            return True
        return bool(self._bodies) and any(map(takes, weights))

    def normed(self, x: mx.array, norm: Norm | None, residual: mx.array | None = None) -> mx.array:
        """Normalise rows, if there is a norm, and add a residual, if there is one."""
        if norm is None or "rms_norm" not in self._enabled:
            y = rms_norm_reference(x, norm)
            return y if residual is None else residual + y
        return rms_norm.rms_norm(x, norm, residual, target=self._target)

    def _is_scored(self, weight: Weight) -> bool:
        N, K = weight.shape[-2:]
        return (
            "scores" in self._enabled
            and not takes(weight)
            and takes_router(weight)
            and N * K <= MOST_SCORES
        )

    def scores(
        self,
        norm: Norm | None,
        weight: Weight,
        bias: mx.array | None,
        dtype: mx.Dtype | None = None,
    ) -> Callable[[mx.array], mx.array | None] | None:
        """The norm and a product with a small weight that has no 4-bit body, of up to eight rows.

        None where there is no body for it; the function returns None where it cannot run.
        """
        if not self._is_scored(weight):
            return None
        target, (N, K) = self._target, weight.shape
        own = weight.scales.dtype if isinstance(weight, QuantizedWeight) else weight.dtype

        def launch(x: mx.array) -> mx.array:
            return experts_scores(x, norm, weight, bias, dtype=dtype or x.dtype, target=target)

        @functools.cache
        def can_run() -> bool:
            zeros, sizes = mx.zeros((1, K), own), f"{N} columns of {K} values"
            return runs("scores", sizes, lambda: launch(zeros), target)

        return lambda x: launch(x) if can_run() else None

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
            home = self.chains.homes.get(id(quantized[0].codes))
            product = product.bundled() if home is None else replace(product, bundle=home)
            x = mx.zeros((1, product.inner), quantized[0].scales.dtype)
            self._body(product, x, self._zeros_of(form, norm))

        def run(x: mx.array, added: mx.array | None, phase: Phase) -> list[mx.array] | None:
            if phase is not Phase.DECODE or x.shape[0] > MAX_ROWS:
                return None
            if added is not None and added.dtype != x.dtype:
                return None
            zeros = self._zeros_of(form, norm)
            parts = None if norm is None else self.sums.parts(x)
            name = None if parts is None else self._body(product, x, zeros, parts)
            if name is None:
                parts, name = None, self._body(product, x, zeros)
            if name is None:
                return None
            rows = self.sums.written(x) if parts is None else parts.branch
            made = self._launch(name, product, rows, added, zeros, parts)
            if parts is not None:
                self.sums.put(x, made.pop())
            if len(made) > product.parts:
                self.chains.zeros.put(x, made.pop())
            return made

        return run

    def _zeros_of(self, form: str | None, norm: Norm | None) -> int:
        """How many zeros a product writes besides; the first of a layer has a norm."""
        is_first = form == "fused_projections" and norm is not None
        return COUNTERS if is_first and self.chains.zeros.are_wanted else 0

    @property
    def leaves_sums(self) -> bool:
        """Whether a norm behind a branch, and the branch's sum, may be left to later launches."""
        return "int4_mma" in self._bodies and {"fused_residual", "rms_norm"} <= self._enabled

    def factors_of_sum(self, norm: Norm | None) -> mx.array | None:
        """`factors_of` a norm behind a branch, if a later product may add that branch."""
        return None if norm is None or not self.leaves_sums else factors_of(norm)

    def _launch(
        self,
        name: str,
        product: Int4Product,
        x: mx.array,
        added: mx.array | None,
        zeros: int,
        parts: StreamSum | None,
    ) -> list[mx.array]:
        if name == "int4_mma":
            return int4_mma.int4_mma(product, x, added, self._target, zeros=zeros, parts=parts)
        return vector_product(product, x, added, self._target)

    def single(
        self, weight: Weight, bias: mx.array | None, dtype: mx.Dtype | None = None
    ) -> Callable[[mx.array, Phase], mx.array]:
        """A product with one weight: a body for a few rows in decode, MLX's operations else."""
        body = self.fused(None, [weight], [bias], dtype=dtype)
        few = self.scores(None, weight, bias, dtype)

        def run(x: mx.array, phase: Phase) -> mx.array:
            made = None if body is None else body(x, None, phase)
            if made is not None:
                return made[0]
            if few is not None and phase is Phase.DECODE and x.shape[0] <= MAX_ROWS:
                scored = few(x)
                if scored is not None:
                    return scored
            dense = "dense_prefill" in self._enabled
            y = dense_prefill.wide_product(x, weight, bias, self._target, enabled=dense)
            return y if dtype is None else y.astype(dtype)

        return run

    def _body(
        self, product: Int4Product, x: mx.array, zeros: int, parts: StreamSum | None = None
    ) -> str | None:
        """The first body that serves; each is built and tried once for every size."""
        for name in self._bodies if parts is None else ["int4_mma"]:
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
                zeros,
                parts is None,
                *product.template(x).items(),
            )
            if key not in self._verdicts:
                self._verdicts[key] = self._runs(name, product, x, zeros, parts)
            if self._verdicts[key]:
                return name
        return None

    def _runs(
        self, name: str, product: Int4Product, x: mx.array, zeros: int, parts: StreamSum | None
    ) -> bool:
        def launch() -> list[mx.array]:
            rows = mx.zeros(x.shape, x.dtype)
            added = mx.zeros((x.shape[0], product.widths[0]), x.dtype) if product.residual else None
            given = None if parts is None else StreamSum(rows, rows, parts.norm)
            return self._launch(name, product, rows, added, zeros, given)

        sizes = f"{'+'.join(map(str, product.widths))} columns of {product.inner} values"
        return runs(name, sizes, launch, self._target, instead="the next kernel does")

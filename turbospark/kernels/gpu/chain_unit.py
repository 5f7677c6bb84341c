"""The unit of a dense layer's second half on NVIDIA GPUs: one launch, or none."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.int4_chain import (
    COUNTERS,
    Int4Chain,
    int4_chain,
    is_faster,
    takes_rows,
)
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.step_zeros import StepZeros
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.target import FinishLayer
from turbospark.kernels.weights import Activation, Norm, Weight
from turbospark.protocols import Phase


class ChainUnits:
    """Binds the second halves of layers.

    Attributes:
        homes: the bundle in which a matrix of a chain lies, by its codes' id; a launch of such a
            matrix alone reads it there.
        zeros: what a layer's first launch writes for the chain to count in.
    """

    def __init__(self, target: GpuTarget, enabled: frozenset[str]) -> None:
        self._target, self._enabled = target, enabled
        self._verdicts: dict[tuple[object, ...], bool] = {}
        self.homes: dict[int, Bundle] = {}
        self.zeros = StepZeros()

    def bind(
        self,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
        norm: Norm | None,
        activation: Activation,
        post_norms: tuple[Norm, Norm] | None,
    ) -> FinishLayer | None:
        """One launch for the second half of a layer, or None if it has none.

        Args:
            weights: output, gate, up and down.
            biases: one a weight.
            norm, activation, post_norms: as in `Int4Chain`.
        """
        chain = Int4Chain.build(weights, biases, norm, activation, post_norms)
        needed = {"int4_chain", "int4_mma", "fused_projections"}
        if chain is None or self._target.own != "cuda" or not needed <= self._enabled:
            return None
        if not is_faster(chain):
            return None
        if not any(id(w.codes) in self.homes for w in chain.weights):
            bundle = chain.bundled()
            chain = replace(chain, bundle=bundle)
            self.homes |= {id(w.codes): bundle for w in chain.weights}
        K, C, _ = chain.sizes
        dtype = chain.weights[0].scales.dtype
        if not self._serves(chain, mx.zeros((1, K), dtype), mx.zeros((1, C), dtype)):
            return None
        self.zeros.are_wanted = True

        def run(x: mx.array, residual: mx.array, phase: Phase) -> mx.array | None:
            zeros = self.zeros.take(residual)
            if zeros is None or phase is not Phase.DECODE:
                return None
            if not self._serves(chain, x, residual):
                return None
            return int4_chain(chain, x, residual, zeros, self._target)

        return run

    def _serves(self, chain: Int4Chain, x: mx.array, residual: mx.array) -> bool:
        """Whether the chain's body serves these rows; it is tried once for every size."""
        if not takes_rows(chain, x, residual):
            return False
        arrays = (*chain.biases, *chain.norm_weights)
        types = [array.dtype for array in arrays if array is not None]
        first = chain.weights[0]
        shape = (first.scales.dtype, first.biases is None, first.zero, chain.activation)
        has = [array is None for array in arrays]
        key = ("int4_chain", chain.sizes, x.shape[0], x.dtype, *types, *shape, *has)
        if key not in self._verdicts:

            def launch() -> mx.array:
                counters = mx.zeros((COUNTERS,), mx.int32)
                rows, stream = mx.zeros(x.shape, x.dtype), mx.zeros(residual.shape, x.dtype)
                return int4_chain(chain, rows, stream, counters, self._target)

            sizes = "{} to {} to {} values".format(*chain.sizes)
            self._verdicts[key] = runs(
                "int4_chain", sizes, launch, self._target, instead="three launches do"
            )
        return self._verdicts[key]

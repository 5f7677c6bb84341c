"""Hyper-connections around a block: the mixture it reads, and what its output adds to."""

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels import target
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.streams import (
    grouped_norm_reference,
    inject_reference,
    mix_streams_reference,
)
from turbospark.kernels.target import KernelSet, Said
from turbospark.kernels.weights import StreamWeights
from turbospark.nn.linear import Linear, Matrix, RMSNorm
from turbospark.nn.projections import NormedProjections, OutputHead
from turbospark.nn.unit import Unit
from turbospark.protocols import Phase


class MixStreams(Unit):
    """Norm of every stream, shares of low rank, their mixture; and what a block's output adds to.

    Args:
        norm: of all streams, each normalised by itself.
        down: [rank, G * C].
        up: [G * C, rank].
        inject: [G, G * C], or None where no block follows.
        groups: G.
    """

    def __init__(
        self, norm: RMSNorm, down: Linear, up: Linear, inject: Linear | None, groups: int
    ) -> None:
        self._norm, self._down, self._up, self._inject = norm, down, up, inject
        self._groups = groups
        self._enter = NormedProjections(None, [down] if inject is None else [down, inject])
        self._leave = NormedProjections(None, [up])
        self._run: target.MixStreams | None = None

    def bind(self, kernels: KernelSet) -> None:
        inject = None if self._inject is None else self._inject.value
        weights = StreamWeights(
            self._norm.value, self._down.value, self._up.value, inject, self._groups
        )
        self._run = kernels.mix_streams(weights)
        self.body = kernels.name
        if self._run is None:
            for unit in (self._enter, self._leave):
                unit.bind(kernels)
            self.body = self._enter.body

    def __call__(
        self, h: mx.array, phase: Phase, said: Said | None = None
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Mix the streams h [T, G * C].

        Args:
            h: the streams.
            phase: prefill or decode.
            said: what the block before made of its mixture [T, C], and the shares [T, G] in which
                the streams take it; None where they hold it already.

        Returns:
            The streams with what was said; their mixture [T, C], normed; and the shares [T, G] of
            what the next block will say, if one follows.
        """
        return self._run(h, said, phase) if self._run else self.reference(h, said, phase)

    def reference(
        self, h: mx.array, said: Said | None, phase: Phase
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        G = self._groups
        h = h if said is None else inject_reference(h, *said)
        normed = grouped_norm_reference(h, self._norm.value, G)
        low, *inject = self._enter(normed, phase)  # [T, rank], [T, G]
        (up,) = self._leave(activate_reference(low / G, "silu"), phase)
        mixed = mix_streams_reference(normed, up, G)
        return h, mixed, 2 * mx.sigmoid(inject[0] / G) if inject else None


class Inject(Unit):
    """The streams with a block's output added to each, in its share."""

    def bind(self, kernels: KernelSet) -> None:
        """Nothing to look up: it has no weights."""

    def __call__(self, h: mx.array, said: Said | None) -> mx.array:
        """Add what a block said, if any, to h [T, G * C]: [T, C] in shares [T, G]."""
        return h if said is None else inject_reference(h, *said)


class StreamMixer(nn.Module):
    """The weights around one block, named as in checkpoints.

    Args:
        dims: of one stream, C.
        groups: streams, G.
        rank: of the mixture's shares.
        eps: of the norm.
        injects: whether a block follows, whose output the streams take.
    """

    def __init__(self, dims: int, groups: int, rank: int, eps: float, *, injects: bool) -> None:
        super().__init__()
        width = groups * dims
        self.hc_norm = RMSNorm(width, eps)
        self.input_mix_weight_down = Linear(width, rank)
        self.input_mix_weight_up = Linear(rank, width)
        inject = None
        if injects:
            self.block_inject_weight = inject = Linear(width, groups)
        self.mix = MixStreams(
            self.hc_norm, self.input_mix_weight_down, self.input_mix_weight_up, inject, groups
        )

    def __call__(
        self, h: mx.array, phase: Phase, said: Said | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The streams [T, G * C], what the block reads [T, C], and the shares [T, G] of its say."""
        h, mixed, shares = self.mix(h, phase, said)
        assert shares is not None
        return h, mixed, shares


class StreamHead(Unit):
    """float32 logits of the streams: the last mixture, then the output head."""

    def __init__(self, mixer: StreamMixer, matrix: Matrix) -> None:
        self._mixer = mixer
        self._head = OutputHead(None, matrix)

    def bind(self, kernels: KernelSet) -> None:
        self._head.bind(kernels)
        self.body = self._head.body

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Give the logits of h [R, G * C]: [R, V] float32."""
        _, mixed, _ = self._mixer.mix(h, phase)
        return self._head(mixed, phase)

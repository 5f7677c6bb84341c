"""Hyper-connections around a block: the mixture it reads, and what its output adds to."""

import mlx.core as mx
import mlx.nn as nn

from turbospark.kernels.activations import activate_reference
from turbospark.kernels.streams import (
    grouped_norm_reference,
    inject_reference,
    mix_streams_reference,
)
from turbospark.kernels.target import KernelSet
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
        self._norm, self._groups = norm, groups
        self._enter = NormedProjections(None, [down] if inject is None else [down, inject])
        self._leave = NormedProjections(None, [up])

    def bind(self, kernels: KernelSet) -> None:
        for unit in (self._enter, self._leave):
            unit.bind(kernels)
        self.body = self._enter.body

    def __call__(self, h: mx.array, phase: Phase) -> tuple[mx.array, mx.array | None]:
        """Mix the streams h [T, G * C].

        Returns:
            [T, C], normed; and the shares [T, G] of a block's output, if one follows.
        """
        G = self._groups
        normed = grouped_norm_reference(h, self._norm.value, G)
        low, *inject = self._enter(normed, phase)  # [T, rank], [T, G]
        (up,) = self._leave(activate_reference(low / G, "silu"), phase)
        mixed = mix_streams_reference(normed, up, G)
        return mixed, 2 * mx.sigmoid(inject[0] / G) if inject else None


class Inject(Unit):
    """The streams with a block's output added to each, in its share."""

    def bind(self, kernels: KernelSet) -> None:
        """Nothing to look up: it has no weights."""

    def __call__(self, h: mx.array, y: mx.array, shares: mx.array) -> mx.array:
        """Add y [T, C] to h [T, G * C] in shares [T, G]: [T, G * C]."""
        return inject_reference(h, y, shares)


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
        self.inject = Inject()

    def __call__(self, h: mx.array, phase: Phase) -> tuple[mx.array, mx.array]:
        """What the block reads [T, C], and the shares [T, G] of what it will say."""
        mixed, shares = self.mix(h, phase)
        assert shares is not None
        return mixed, shares


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
        mixed, _ = self._mixer.mix(h, phase)
        return self._head(mixed, phase)

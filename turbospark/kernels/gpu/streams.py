"""Mixtures of residual streams on a GPU; the reference is kernels/streams.py."""

import mlx.core as mx

from turbospark.kernels.activations import activate_reference
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.streams import inject_reference, mix_streams_reference
from turbospark.kernels.target import MixStreams, Project, Said
from turbospark.kernels.weights import Norm, StreamWeights
from turbospark.protocols import Phase


def bind_streams(
    weights: StreamWeights, enter: Project, leave: Project, target: GpuTarget
) -> MixStreams:
    """The norm of all streams in one launch, then the products; MLX fuses the rest.

    Args:
        weights: of the mixture.
        enter: x [T, G * C] -> [T, rank], and [T, G] where a block follows.
        leave: x [T, rank] -> [T, G * C].
        target: where.
    """
    G, given = weights.groups, weights.norm.weight
    assert given is not None
    norm = Norm(mx.reshape(given, (G, -1)), weights.norm.eps)

    def run(
        h: mx.array, said: Said | None, phase: Phase
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        h = h if said is None else inject_reference(h, *said)
        parts = mx.reshape(h, (h.shape[0], G, -1))
        normed = mx.reshape(rms_norm(parts, norm, target=target), h.shape)
        low, *inject = enter(normed, phase)
        (up,) = leave(activate_reference(low / G, "silu"), phase)
        mixed = mix_streams_reference(normed, up, G)
        return h, mixed, 2 * mx.sigmoid(inject[0] / G) if inject else None

    return run

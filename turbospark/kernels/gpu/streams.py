"""Mixtures of residual streams on a GPU; the reference is kernels/streams.py."""

import functools

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.gpu.kernel import GpuTarget, Kernel, constant
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.gpu.trial import runs
from turbospark.kernels.target import MixStreams, Project, Said
from turbospark.kernels.weights import Norm, StreamWeights
from turbospark.protocols import Phase

NORM = Kernel("streams_norm", ("h", "said", "shares", "weight", "eps"), ("after", "normed"))
MIX = Kernel("streams_mix", ("up", "normed"), ("mixed",), macros=("OPENS 0",))
OPEN = Kernel(
    "streams_open",
    ("up", "normed", "inject"),
    ("mixed", "opened"),
    body="streams_mix",
    macros=("OPENS 1",),
)

_VALUES = 8  # of a thread, side by side
_COLUMNS = 128  # of a threadgroup


def streams_norm(
    h: mx.array, said: Said, norm: Norm, *, target: GpuTarget
) -> tuple[mx.array, mx.array]:
    """Add what a block said to the streams, and normalise each of them by itself.

    Args:
        h: [T, G * C].
        said: [T, C], and the shares [T, G] in which the streams take it.
        norm: of G * C numbers.
        target: where.

    Returns:
        The streams after that, and normed, both [T, G * C] like `h`.

    Raises:
        ShapeError: the arrays are of other sizes, or the norm has no weight.
    """
    (y, shares), (T, width) = said, h.shape
    G, weight = shares.shape[1], norm.weight
    C = y.shape[1]
    if (
        weight is None
        or not T
        or (y.shape[0], shares.shape[0]) != (T, T)
        or width != G * C
        or weight.shape != (width,)
    ):
        raise ShapeError(f"streams {h.shape} take no {y.shape} in shares {shares.shape}")
    threads = 32 * min(8, -(-C // (32 * _VALUES)))
    after, normed = NORM(
        target,
        [h, y, shares, weight, constant(norm.eps)],
        template={
            "T": h.dtype,
            "D": C,
            "GROUPS": G,
            "THREADS": threads,
            "PARTS": -(-C // (threads * _VALUES)),
        },
        grid=(T * G * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=[(h.shape, h.dtype), (h.shape, h.dtype)],
    )
    return after, normed


def streams_mix(
    up: mx.array, normed: mx.array, inject: mx.array | None, groups: int, *, target: GpuTarget
) -> tuple[mx.array, mx.array | None]:
    """The mixture of the streams, and the shares of what the next block will say.

    Args:
        up: [T, G * C], the shares of the mixture before their sigmoid.
        normed: [T, G * C].
        inject: [T, G], the other shares before theirs, or None where no block follows.
        groups: G, C or less.
        target: where.

    Returns:
        [T, C] like `normed`, and [T, G] or None.

    Raises:
        ShapeError: the arrays are of other sizes.
    """
    T, width = normed.shape
    C, wanted = width // groups, None if inject is None else (T, groups)
    if not T or up.shape != (T, width) or C * groups != width or groups > C:
        raise ShapeError(f"{groups} streams {normed.shape} are not mixed by {up.shape}")
    if inject is not None and inject.shape != wanted:
        raise ShapeError(f"{groups} streams of {T} rows have no shares {inject.shape}")
    outputs = [((T, C), normed.dtype)]
    made = (MIX if inject is None else OPEN)(
        target,
        [up, normed, *([] if inject is None else [inject])],
        template={"T": normed.dtype, "D": C, "GROUPS": groups},
        grid=(-(-C // _COLUMNS) * _COLUMNS, T, 1),
        threadgroup=(_COLUMNS, 1, 1),
        outputs=outputs if inject is None else [*outputs, ((T, groups), normed.dtype)],
    )
    return made[0], made[1] if inject is not None else None


def bind_streams(
    weights: StreamWeights, enter: Project, leave: Project, target: GpuTarget
) -> MixStreams | None:
    """Five launches: norm, two products, an activation between them, the mixture.

    Args:
        weights: of the mixture.
        enter: x [T, G * C] -> [T, rank], and [T, G] where a block follows.
        leave: x [T, rank] -> [T, G * C].
        target: where.

    Returns:
        None where the bodies do not run.
    """
    G, norm = weights.groups, weights.norm
    width = weights.up.shape[0]
    if norm.weight is None or not _runs(G, width // G, target):
        return None
    alone = Norm(mx.reshape(norm.weight, (G, -1)), norm.eps)

    def run(
        h: mx.array, said: Said | None, phase: Phase
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        if said is None:
            parts = mx.reshape(h, (h.shape[0], G, -1))
            normed = mx.reshape(rms_norm(parts, alone, target=target), h.shape)
        else:
            h, normed = streams_norm(h, said, norm, target=target)
        low, *inject = enter(normed, phase)
        (up,) = leave(activate_reference(low / G, "silu"), phase)
        mixed, opened = streams_mix(up, normed, inject[0] if inject else None, G, target=target)
        return h, mixed, opened

    return run


@functools.cache
def _runs(groups: int, dims: int, target: GpuTarget) -> bool:
    def launch() -> list[mx.array]:
        h, y = mx.zeros((2, groups * dims), mx.bfloat16), mx.zeros((2, dims), mx.bfloat16)
        shares, norm = mx.zeros((2, groups), mx.bfloat16), Norm(mx.zeros(groups * dims), 1e-6)
        made = list(streams_norm(h, (y, shares), norm, target=target))
        for inject in (None, shares):
            mixed, opened = streams_mix(h, h, inject, groups, target=target)
            made += [mixed] if opened is None else [mixed, opened]
        return made

    return groups <= dims and runs("streams", f"{groups} of {dims} values", launch, target)

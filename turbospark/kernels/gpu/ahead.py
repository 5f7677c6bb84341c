"""What a launch that leaves memory idle brings near: the weights of the launch behind it.

A delta net, and attention over a short text, take less than half of a large GPU's multiprocessors
and little of its memory's bandwidth, for several microseconds. Threadgroups of theirs with nothing
else to do have the first megabytes of what is multiplied next brought into the second-level cache.
A wrong guess costs time and changes no result.
"""

import functools
from dataclasses import dataclass, replace

import mlx.core as mx

from turbospark.kernels.device import on_cpu
from turbospark.kernels.gpu.bundle import Bundle
from turbospark.kernels.gpu.kernel import Kernel
from turbospark.kernels.weights import QuantizedWeight

AHEAD_BYTES = 12 << 20
"""At most so much is brought near: about what memory gives in the time of such a launch."""

AHEAD_BLOCKS = 64
"""Threadgroups that do so, beside those that work; as few more as fill a layer of the grid."""

AHEAD_PIECE = 8 << 10
"""Bytes of a request, a multiple of 16."""

AHEAD_WAIT = 600
"""Nanoseconds that they leave memory to the others' own first loads."""

MOST_BLOCKS = 66
"""Working threadgroups of a launch that does so; more keep memory busy themselves."""

_CACHED_MAJORS = (9, 10)  # data centre GPUs of 50 MB of cache and more


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Bytes that the next launch reads first.

    Attributes:
        words: a bundle's.
        first: word at which they begin.
        nbytes: whole pieces.
    """

    words: mx.array
    first: int
    nbytes: int

    @staticmethod
    def layers(width: int) -> int:
        """Layers of `width` threadgroups that a grid takes for it."""
        return -(-AHEAD_BLOCKS // width)

    def template(self, blocks: int) -> dict[str, int]:
        """What a body is told of it and of the threadgroups that do it."""
        return {
            "AHEAD_WORD": self.first,
            "AHEAD_BYTES": self.nbytes,
            "AHEAD_BLOCKS": blocks,
            "AHEAD_PIECE": AHEAD_PIECE,
            "AHEAD_WAIT": AHEAD_WAIT,
        }


@dataclass(slots=True, eq=False)
class Follower:
    """What followed a unit's launch the last time: a bundle and the word read first, or nothing."""

    found: tuple[Bundle, int] | None = None


class LaunchOrder:
    """The order in which a model's launches read weights, learnt from one pass to the next.

    Units note their turns in every pass, a prefill too, so that a step is built with its guesses.
    """

    def __init__(self) -> None:
        self._waiting: Follower | None = None

    def turn(self, unit: Follower) -> Ahead | None:
        """A unit that leaves memory idle has its turn: what followed last time, if that is known.

        Args:
            unit: the unit's own, the same in every pass.
        """
        self._waiting = unit
        if unit.found is None:
            return None
        bundle, first = unit.found
        nbytes = min(AHEAD_BYTES, 4 * (bundle.words.size - first)) // AHEAD_PIECE * AHEAD_PIECE
        return Ahead(bundle.words, first, nbytes) if nbytes else None

    def reads(self, bundle: Bundle | None = None, weight: QuantizedWeight | None = None) -> None:
        """Weights have their turn.

        Args:
            bundle: where they lie; None if that is nowhere to be read from ahead.
            weight: the first of them.
        """
        if self._waiting is None:
            return
        place = None if bundle is None or weight is None else bundle.place(weight.codes)
        self._waiting.found = None if bundle is None or place is None else (bundle, place)
        self._waiting = None


def reads_ahead() -> bool:
    """Whether the GPU that MLX computes on has the cache for it."""
    if on_cpu() or not mx.cuda.is_available():
        return False
    return mx.device_info().get("compute_capability_major") in _CACHED_MAJORS


@functools.cache
def bringing_near(kernel: Kernel) -> Kernel:
    """A body whose launch brings words near; they are one more input, the last."""
    return replace(
        kernel,
        name=f"{kernel.name}_ahead",
        inputs=(*kernel.inputs, "ahead"),
        body=kernel.body or kernel.name,
        macros=("AHEAD", *kernel.macros),
        helpers=("ahead.h", *kernel.helpers),
    )

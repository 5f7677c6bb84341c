"""Sums that one launch of a step leaves to a later one, which forms them as it reads its rows."""

from dataclasses import dataclass

import mlx.core as mx

from turbospark.kernels.gpu.by_array import ByArray
from turbospark.kernels.gpu.kernel import resident
from turbospark.kernels.weights import Norm


@dataclass(frozen=True, slots=True, eq=False)
class StreamSum:
    """h = stream + norm(branch), from what it is made.

    Attributes:
        branch: [M, K], what a projection gave.
        stream: [M, K], of the same dtype.
        norm: `factors_of` the norm behind the branch.
    """

    branch: mx.array
    stream: mx.array
    norm: mx.array


def factors_of(norm: Norm) -> mx.array | None:
    """A norm in one array: its weight [K] in float32, and eps behind it; None without a weight."""
    if norm.weight is None:
        return None
    eps = mx.array([norm.eps], mx.float32)
    return resident(mx.concatenate([norm.weight.astype(mx.float32), eps]))


class StepSums:
    """Knows of arrays how they were made, for the launches that read them.

    MLX computes what is read. So a plain sum is there for whoever wants it, at the cost of a launch
    of its own; a launch that reads rows of the stream may take the parts instead, and the sum that
    it writes besides is what later launches of the layer read.

    An array is known by its identity, and MLX does not tell who changes one in place. So whoever
    steers the stream between layers makes a new array: `h = h + v`, not `h += v`.
    """

    def __init__(self) -> None:
        self._known = ByArray[StreamSum | mx.array]()

    def put(self, h: mx.array, made: StreamSum | mx.array) -> None:
        """Keep what `h` is the sum of, or that sum as a launch has written it."""
        self._known.put(h, made)

    def parts(self, h: mx.array) -> StreamSum | None:
        """What `h` is the sum of, as long as no launch has written it."""
        made = self._known.get(h)
        return made if isinstance(made, StreamSum) else None

    def written(self, h: mx.array) -> mx.array:
        """The sum as a launch has written it, or `h`."""
        made = self._known.get(h)
        return made if isinstance(made, mx.array) else h

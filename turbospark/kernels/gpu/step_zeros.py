"""Zeros that one launch of a step writes, for a later launch of it to count in."""

import mlx.core as mx

from turbospark.kernels.gpu.by_array import ByArray


class StepZeros:
    """Hands zeros from a layer's first launch to its last one.

    Both read the same rows of the stream, so these rows tell which zeros are meant. Whatever runs
    the model at the same time has rows of its own, and each zeros are taken once.
    """

    def __init__(self) -> None:
        self._written = ByArray[mx.array]()
        self.are_wanted = False
        """Whether any launch takes them."""

    def put(self, rows: mx.array, zeros: mx.array) -> None:
        """Keep zeros for the launch that will take the same rows."""
        self._written.put(rows, zeros)

    def take(self, rows: mx.array) -> mx.array | None:
        """The zeros that came with these rows, or None."""
        return self._written.take(rows)

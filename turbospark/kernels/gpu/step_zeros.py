"""Zeros that one launch of a step writes, for a later launch of it to count in."""

import weakref

import mlx.core as mx


class StepZeros:
    """Hands zeros from a layer's first launch to its last one.

    Both read the same rows of the stream, so these rows tell which zeros are meant. Whatever runs
    the model at the same time has rows of its own, and each zeros are taken once.
    """

    def __init__(self) -> None:
        self._written: dict[int, tuple[weakref.ref[mx.array], mx.array]] = {}
        self.are_wanted = False
        """Whether any launch takes them."""

    def put(self, rows: mx.array, zeros: mx.array) -> None:
        """Keep zeros for the launch that will take the same rows."""
        key, written = id(rows), self._written

        def forget(_: object) -> None:
            written.pop(key, None)

        written[key] = weakref.ref(rows, forget), zeros

    def take(self, rows: mx.array) -> mx.array | None:
        """The zeros that came with these rows, or None."""
        reference, zeros = self._written.pop(id(rows), (None, None))
        return zeros if reference is not None and reference() is rows else None

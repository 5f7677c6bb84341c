"""The drafter that proposes nothing."""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from turbospark.errors import CheckpointError, ProducerError
from turbospark.protocols import ForwardOutput


class NoState:
    """What `NoDrafter` remembers: nothing, so it can stand anywhere."""

    cursor = 0
    nbytes = 0

    def fork(self) -> "NoState":
        """The same nothing."""
        return self

    def mark(self) -> None:
        """Nothing is needed."""

    def resume_at(self, keep: int, mark: object = None) -> int:
        """Anywhere."""
        return keep

    def rewind(self, position: int, mark: object = None) -> None:
        """There is nothing to move."""

    def export(self) -> dict[str, mx.array]:
        """No arrays."""
        return {}

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take no arrays."""
        refuse_arrays("no drafter", arrays)


class NoDrafter:
    """Stands where a drafter would, and says why there is none.

    Args:
        reason: shown in the results.
    """

    name = "off"
    block_passes = True
    max_block = 0
    hidden = False
    taps: tuple[int, ...] = ()

    def __init__(self, reason: str = "drafting is off") -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"NoDrafter({self.reason!r})"

    def new_state(self, max_context: int) -> NoState:
        """An empty state."""
        return NoState()

    def observe(
        self, state: NoState, ids: Sequence[int], start: int, output: ForwardOutput
    ) -> None:
        """There is nothing to follow."""

    def prime(self, state: NoState, ids: Sequence[int], anchor: int) -> None:
        """There is nothing to bring up."""

    def step(self, state: NoState, token: int, position: int) -> mx.array:
        """Refused: there is no drafter."""
        raise ProducerError(f"a draft step was asked for, but {self.reason}")

    def block(self, state: NoState, ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """No proposals."""
        return []


def refuse_arrays(what: str, arrays: Mapping[str, mx.array]) -> None:
    """Refuse arrays for a state that keeps none.

    Raises:
        CheckpointError: there are some.
    """
    if arrays:
        raise CheckpointError(
            f"the file holds {', '.join(sorted(arrays))} for a drafter, but {what} keeps no "
            "arrays; load it with the drafter that it was saved with"
        )

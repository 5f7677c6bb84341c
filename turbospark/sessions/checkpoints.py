"""Positions that recurrent layers can go back to.

The state of a recurrent layer folds all tokens into one value, so there is no way back but to a
state that was kept. Keeping one is free of copies and costs the memory of the state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from turbospark.protocols import RollbackPoint

DEFAULT_EVERY = 512
DEFAULT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A position whose recurrent states were kept.

    Attributes:
        point: the position, and the states by reference.
        mark: what the drafter needs to stand there too; None where it did not.
        ends_prompt: whether it was taken near the end of a prompt.
    """

    point: RollbackPoint
    mark: Any = None
    ends_prompt: bool = False

    @property
    def position(self) -> int:
        """Tokens fed."""
        return self.point.position

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of what the drafter kept."""
        states = self.point.recurrent.values()
        own = sum(array.nbytes for state in states for array in state)
        return own + getattr(self.mark, "nbytes", 0)


class Checkpoints:
    """The checkpoints of one session, by ascending position.

    Over the byte budget the oldest are dropped first; the newest at a prompt's end is the last to
    go, since the next prompt is likeliest to part from this text after it.

    Args:
        budget: bytes of states and of drafters' marks; 0 keeps none.
        every: tokens between two of them at most, where passes end often enough.
    """

    def __init__(self, budget: int = DEFAULT_BYTES, every: int = DEFAULT_EVERY) -> None:
        self.budget = budget
        self.every = every
        self._kept: list[Checkpoint] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"Checkpoints({[kept.position for kept in self._kept]}, budget={self.budget})"

    @property
    def all(self) -> Sequence[Checkpoint]:
        """What is kept now."""
        return tuple(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept; a state or rows that the caches still hold count too."""
        return sum(kept.nbytes for kept in self._kept)

    def due(self, position: int) -> bool:
        """Whether `every` tokens have passed since the last one."""
        last = self._kept[-1].position if self._kept else 0
        return self.budget > 0 and position - last >= self.every

    def add(self, taken: Checkpoint) -> None:
        """Keep one at the newest position; drop what the budget does not hold.

        What the drafter kept is left out where the two together exceed the budget.
        """
        if taken.nbytes > self.budget:
            taken = replace(taken, mark=None)
        if taken.position <= 0 or taken.nbytes > self.budget:
            return
        kept = self._kept
        ends_prompt = taken.ends_prompt
        if kept and kept[-1].position == taken.position:
            ends_prompt = kept.pop().ends_prompt or ends_prompt
        kept.append(Checkpoint(taken.point, taken.mark, ends_prompt))
        total = self.nbytes
        while total > self.budget:
            total -= kept.pop(self._least_wanted()).nbytes

    def drop_beyond(self, position: int) -> None:
        """Forget those of tokens that were taken back."""
        while self._kept and self._kept[-1].position > position:
            self._kept.pop()

    def clear(self) -> None:
        """Forget all."""
        self._kept = []

    def copy(self) -> "Checkpoints":
        """The same checkpoints, for a session that goes its own way from here."""
        twin = Checkpoints(self.budget, self.every)
        twin._kept = list(self._kept)
        return twin

    def _least_wanted(self) -> int:
        ends = [index for index, kept in enumerate(self._kept) if kept.ends_prompt]
        return 1 if ends and ends[-1] == 0 and len(self._kept) > 1 else 0

"""Fitting a conversation into its context: the oldest turns go first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Turn = TypeVar("Turn")


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Turn]):
    """What is left of a conversation.

    Attributes:
        retained: the turns that stay, in order.
        length: what they measure together.
        removed: how many went.
        room_for_generation: whether they measure less than the bound. They may not: the leading
            instruction and the newest turn stay whatever their length.
    """

    retained: tuple[Turn, ...]
    length: int
    removed: int
    room_for_generation: bool


def fit(
    turns: Sequence[Turn],
    *,
    has_leading_instruction: bool,
    bound: int,
    measure: Callable[[Sequence[Turn]], int],
) -> Fitted[Turn]:
    """Leave out the oldest turns until the rest measures less than `bound`.

    Args:
        turns: oldest first; left as they are.
        has_leading_instruction: whether the first of them is to stay.
        bound: tokens, of which at least one is to be left for the reply.
        measure: tokens of some turns together; a template may add to them, so the whole is
            measured each time.
    """
    retained = list(turns)
    oldest = 1 if has_leading_instruction else 0
    length = measure(retained)
    while length >= bound and len(retained) > oldest + 1:
        del retained[oldest]
        length = measure(retained)
    return Fitted(tuple(retained), length, len(turns) - len(retained), length < bound)

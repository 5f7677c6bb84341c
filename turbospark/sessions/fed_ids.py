"""The record of what was fed: ids in position order, and whether it can be trusted."""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

FAILED = "an earlier forward pass failed, so the caches are not trusted"
GAP = "tokens were fed that the record does not hold"


class FedIds(Sequence[int]):
    """Ids that went through the model, in position order; never derived from a counter.

    The record describes no more state than the caches hold. Taint says that it may describe
    another state; it lasts until `clear`.
    """

    def __init__(self) -> None:
        self._ids = array("i")
        self._taint = ""

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self._ids[index]
        return found if isinstance(found, int) else found.tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __repr__(self) -> str:
        return f"FedIds({len(self)} ids{', tainted' if self._taint else ''})"

    @property
    def ids(self) -> list[int]:
        """A copy of the ids."""
        return self._ids.tolist()

    @property
    def tainted(self) -> bool:
        """Whether the record is worthless."""
        return bool(self._taint)

    @property
    def taint_reason(self) -> str:
        """Why it is; an empty string where it is not."""
        return self._taint

    def clear(self) -> None:
        """Forget everything, the taint too."""
        self._ids = array("i")
        self._taint = ""

    def taint(self, reason: str = FAILED) -> None:
        """Distrust the record until `clear`; the first reason stands."""
        self._taint = self._taint or reason

    def copy(self) -> "FedIds":
        """An independent record of the same."""
        twin = FedIds()
        twin._ids, twin._taint = self._ids[:], self._taint
        return twin

    def record(self, tokens: Sequence[int], position: int) -> None:
        """Note that `tokens` were fed from `position` on.

        What stood there before is replaced. A gap between the record and `position` empties and
        taints it.
        """
        if position > len(self._ids):
            self._ids = array("i")
            self.taint(GAP)
            return
        del self._ids[position:]
        self._ids.extend(tokens)

    def rewind_to(self, position: int) -> None:
        """Keep the first `position` ids; a record already as short stays as it is."""
        del self._ids[position:]

    def common_prefix(self, prompt: Sequence[int]) -> int:
        """How many leading ids a prompt shares with the record, its last id never among them.

        The last id has to be fed again in any case, since its logits are wanted.
        """
        if self._taint:
            return 0
        bound = min(len(self._ids), len(prompt) - 1)
        for index in range(bound):
            if self._ids[index] != prompt[index]:
                return index
        return max(bound, 0)

"""How many bytes idle conversations may keep, and which of them give way."""

import threading
import weakref
from typing import Protocol

LARGEST = 2 << 30


class Idle(Protocol):
    """A conversation that may have to give its memory back."""

    @property
    def nbytes(self) -> int:
        """Bytes it holds now."""
        ...

    def give_back(self) -> bool:
        """Drop what can be computed again; False where a reply is in progress."""
        ...


def default_limit(free_bytes: int | None) -> int:
    """2 GiB, or a quarter of the free memory where that is less."""
    return LARGEST if free_bytes is None else min(LARGEST, free_bytes // 4)


class ByteBudget:
    """Keeps conversations that are not in use within a number of bytes.

    Conversations are known by weak references: one that nobody holds any more counts for nothing.

    Args:
        limit: bytes that all but the one in use may hold together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._known: list[weakref.ref[Idle]] = []
        """Least recently used first."""

    def __repr__(self) -> str:
        return f"ByteBudget({self.nbytes} of {self.limit} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes that all known conversations hold."""
        return sum(idle.nbytes for idle in self._living())

    def use(self, wanted: Idle, held: int = 0) -> int:
        """Note that a conversation is in use now; the least recently used others make room.

        Args:
            wanted: the one in use.
            held: bytes of it that are idle all the same.

        Returns:
            how many gave their memory back.
        """
        with self._lock:
            others = [idle for idle in self._living() if idle is not wanted]
            self._known = [weakref.ref(idle) for idle in [*others, wanted]]
        over = held + sum(idle.nbytes for idle in others) - self.limit
        count = 0
        for idle in others:
            if over <= 0:
                break
            size = idle.nbytes
            if size and idle.give_back():
                over -= size
                count += 1
        return count

    def forget(self, gone: Idle) -> None:
        """Count a conversation no more."""
        with self._lock:
            self._known = [ref for ref in self._known if ref() not in (None, gone)]

    def _living(self) -> list[Idle]:
        return [idle for ref in self._known if (idle := ref()) is not None]

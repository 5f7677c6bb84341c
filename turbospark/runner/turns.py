"""Whose turn it is: a lock that is given in the order in which it was asked for."""

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

_HANDED_ON = -1
_Item = TypeVar("_Item")


class TurnLock:
    """A re-entrant lock that starves nobody.

    A thread that frees Python's own lock and asks for it again gets it before one that has been
    waiting, so of two texts that share it one would stand still until the other ends.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._guard:
            if self._owner == me or (self._owner is None and not self._waiting):
                self._owner = me
                self._depth += 1
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:
            self._give_up(gate)
            raise
        self._owner, self._depth = me, 1

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            with self._guard:
                self._hand_on()

    def _hand_on(self) -> None:
        if self._waiting:
            self._owner = _HANDED_ON
            self._waiting.popleft().release()
        else:
            self._owner = None

    def _give_up(self, gate: threading.Lock) -> None:
        """Leave the queue, or hand on what came at the same moment."""
        with self._guard:
            if gate in self._waiting:
                self._waiting.remove(gate)
            else:
                self._hand_on()


def begun(items: Iterator[_Item], lock: AbstractContextManager[Any]) -> Iterator[_Item]:
    """The same items; the first is waited for under a lock, which is free again between them."""
    with lock:
        first = list(itertools.islice(items, 1))
    yield from first
    yield from items

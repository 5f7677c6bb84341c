"""One conversation: caches and the record of what they hold, moved together."""

from collections.abc import Callable, Sequence
from typing import Any

from turbospark.errors import RewindError
from turbospark.sessions.fed_ids import FedIds

MakeCaches = Callable[[], list[Any]]


class Session:
    """Caches and fed ids of one conversation.

    Args:
        make_caches: gives empty caches; called now and at every reset.
        max_context: tokens the caches may hold.

    Attributes:
        pending: the last generated token, which belongs to the text and was not fed.
    """

    def __init__(self, make_caches: MakeCaches, max_context: int) -> None:
        self._make_caches = make_caches
        self.max_context = max_context
        self.caches = make_caches()
        self.fed_ids = FedIds()
        self.pending: int | None = None

    def __repr__(self) -> str:
        state = "tainted" if self.fed_ids.tainted else "live"
        return f"Session({self.position} of {self.max_context} tokens, {state})"

    @property
    def position(self) -> int:
        """Tokens the caches hold; also the position of the next one."""
        return self.caches[0].offset if self.caches else len(self.fed_ids)

    @property
    def text_ids(self) -> list[int]:
        """The ids of the text so far: those fed, and the one that was generated last."""
        return [*self.fed_ids.ids, *([] if self.pending is None else [self.pending])]

    @property
    def nbytes(self) -> int:
        """Bytes the caches have allocated."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def max_rewind(self) -> int:
        """How many tokens every cache can take back."""
        return min((cache.max_rewind() for cache in self.caches), default=self.position)

    def fresh_caches(self) -> list[Any]:
        """Empty caches like this session's own."""
        return self._make_caches()

    def reset(self) -> None:
        """Start over at position 0; a taint is lifted."""
        self.caches = self._make_caches()
        self.fed_ids.clear()
        self.pending = None

    def record(self, tokens: Sequence[int], position: int) -> None:
        """Note that the caches have advanced over `tokens` from `position` on."""
        self.pending = None
        self.fed_ids.record(tokens, position)

    def taint(self) -> None:
        """Say that caches and record may differ; only `reset` mends it."""
        self.fed_ids.taint()

    def rewind_to(self, position: int) -> None:
        """Take every cache and the record back to `position`.

        Raises:
            RewindError: a cache cannot go back as far; nothing has moved.
        """
        back = self.position - position
        if back < 0 or back > self.max_rewind:
            raise RewindError(
                f"{self!r} cannot go to position {position}: its caches can go back "
                f"{self.max_rewind} tokens; reset and feed the text again"
            )
        if back:
            for cache in self.caches:
                cache.rewind(back)
        self.fed_ids.rewind_to(position)

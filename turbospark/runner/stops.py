"""Stop strings over text that arrives in pieces."""

from collections.abc import Iterable


class StopMatcher:
    """Lets text through until a stop string is complete; its head is never shown.

    The match that ends first wins, the longest of those that end together, so the outcome does
    not depend on how the text is cut.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take a piece of text; return what may be shown now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._first_match()
        if found is not None:
            start, self.matched = found
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._longest_head()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The text held back, once no more can follow."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _longest_head(self) -> int:
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0

"""Where every loop brings its tokens: one commit decides what is shown and when to end."""

import enum
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from turbospark.runner.stops import StopMatcher


class StreamingDetokenizer(Protocol):
    """Token ids in, text out, for one generation."""

    def add(self, token: int) -> str:
        """Take an id; return the text that is final now."""
        ...

    def finish(self) -> str:
        """Return the text still held back."""
        ...


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a token.

    Attributes:
        token: its id.
        index: 0 for the first generated one.
        text: what may be shown now; may be empty.
        reason: why the generation ends with this token, or None where it goes on.
        stop: the stop string that matched, if any.
    """

    token: int
    index: int
    text: str
    reason: FinishReason | None = None
    stop: str | None = None


def never() -> bool:
    """Nobody cancels."""
    return False


class TokenSink:
    """Turns sampled tokens into text and decides when a generation ends.

    `history` holds the prompt and every token that was committed and is to be fed: exactly the
    ids behind the caches once the loop has fed them. The token that ends a generation is not
    among them.

    Args:
        prompt: the prompt's ids.
        detokenizer: a fresh one.
        stop_ids: ids that end the generation; they are never shown.
        stops: strings that end it; neither they nor what follows is shown.
        max_tokens: the budget, at least 1.
        cancelled: polled after each commit.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        detokenizer: StreamingDetokenizer,
        *,
        stop_ids: Collection[int] = (),
        stops: Iterable[str] = (),
        max_tokens: int,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        self.history = array("i", prompt)
        self.prompt_tokens = len(prompt)
        self.generated = 0
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(stop_ids)
        self._matcher = StopMatcher(stops)
        self._max_tokens = max_tokens
        self._cancelled = cancelled

    @property
    def remaining(self) -> int:
        """Tokens of the budget that are left."""
        return self._max_tokens - self.generated

    def commit(self, token: int) -> Committed:
        """Take one sampled token. After a reason was given, commit nothing more."""
        index = self.generated
        self.generated += 1
        if token in self._stop_ids:
            return self._end(token, index, "", FinishReason.STOP_TOKEN)
        text = self._matcher.feed(self._detokenizer.add(token))
        if self._matcher.matched is not None:
            return self._end(token, index, text, FinishReason.STOP_STRING)
        if self.generated >= self._max_tokens:
            return self._end(token, index, text, FinishReason.MAX_TOKENS)
        if self._cancelled():
            return self._end(token, index, text, FinishReason.CANCELLED)
        self.history.append(token)
        return Committed(token, index, text)

    def _end(self, token: int, index: int, text: str, reason: FinishReason) -> Committed:
        if self._matcher.matched is None:
            # What the detokenizer held back may still complete a stop string.
            text += self._matcher.feed(self._detokenizer.finish())
            text += self._matcher.flush()
        if self._matcher.matched is not None:
            reason = FinishReason.STOP_STRING
        return Committed(token, index, text, reason, self._matcher.matched)

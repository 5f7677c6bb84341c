"""A conversation: one session that grows turn by turn and feeds nothing twice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self, cast

from turbospark.errors import PromptError, UnsupportedError
from turbospark.runner.generation import admit, collect, run
from turbospark.runner.options import read_options
from turbospark.runner.prompt import TextCodec, encode_text
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner

_REFUSED = {"prompt_cache": "a conversation owns its caches; leave it out"}


def _as_message(message: Any) -> dict[str, Any]:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise PromptError(
            f"a message of type {type(message).__name__}: give text, or a mapping with a role and "
            "content"
        )
    return dict(cast("Mapping[str, Any]", message))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt of the conversation: its ids, and its text where a template wrote it."""

    ids: list[int]
    text: str | None


class Conversation:
    """Messages, and the ids behind them. A `with` statement closes it.

    With a chat template every message is a turn of it; without one, what is sent is text that
    continues the text so far.

    Args:
        name: shown in messages.
        runner: over a session of its own.
        tokenizer: the model's.
        stop_ids: ids that end a reply.
        chunk: prompt tokens of one pass.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        tokenizer: TextCodec,
        *,
        stop_ids: frozenset[int],
        chunk: int,
    ) -> None:
        self.name = name
        self.runner = runner
        self.messages: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._chunk = chunk
        self._ids: list[int] = []
        self._written: str | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.messages)} messages"
        return f"Conversation({self.name!r}, {state}, {self.runner.session!r})"

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self!r} cannot be copied or pickled: its caches belong to this process; keep its "
            "`messages` instead"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, message: str | Mapping[str, Any], **options: Any) -> GeneratedText:
        """Send a message and return the whole reply.

        Args:
            message: the user's text, or a message with a role of its own.
            options: as for `Engine.generate`.

        Raises:
            PromptError: the conversation is closed or the message is empty; nothing has moved.
            ContextLengthError: it does not fit; nothing has moved.
        """
        return collect(self.stream(message, **options))

    def stream(
        self, message: str | Mapping[str, Any], **options: Any
    ) -> Iterator[GenerationResponse]:
        """Send a message and give the reply token by token.

        Closing the iterator keeps the reply as far as it was given; closing it before the first
        token, or a failure, leaves the conversation without this message.
        """
        read = read_options(options, refused=_REFUSED)
        if self._closed:
            raise PromptError(f"{self!r} takes no more messages; open another session")
        sent = _as_message(message)
        turn = self._next_turn(sent)
        generation = admit(
            self.runner, self._tokenizer, turn.ids, read, stop_ids=self._stop_ids, chunk=self._chunk
        )

        def responses() -> Iterator[GenerationResponse]:
            before = len(self.messages)
            reply: list[str] = []

            def remember(response: GenerationResponse) -> None:
                reply.append(response.text)
                answer = {"role": "assistant", "content": "".join(reply)}
                self.messages[before:] = [sent, answer]
                self._remember(turn, response, answer["content"])

            yield from run(self.runner, generation, on_step=remember)

        return responses()

    def reset(self) -> None:
        """Forget every message and start over; a reply in progress ends."""
        with self.runner.lock:
            self.runner.begin_turn()
            self.messages, self._ids, self._written = [], [], None
            self.runner.reset()

    def close(self) -> None:
        """Give the memory back; the conversation takes no more messages."""
        self.reset()
        self._closed = True

    def fork(self) -> "Conversation":
        """Not built yet."""
        raise UnsupportedError("Conversation.fork is not built yet; open another session instead")

    def save(self, path: Any) -> None:
        """Not built yet."""
        raise UnsupportedError(
            f"Conversation.save({str(path)!r}) is not built yet; keep `messages` instead"
        )

    def _next_turn(self, sent: Mapping[str, Any]) -> _Turn:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return _Turn(self._plain_ids(sent), None)
        text = tokenizer.apply_chat_template(
            [*self.messages, sent], add_generation_prompt=True, tokenize=False
        )
        if self._written is not None and text.startswith(self._written):
            rest = text[len(self._written) :]
            return _Turn([*self._ids, *tokenizer.encode(rest, add_special_tokens=False)], text)
        # The template rewrites what was said before: tokenize it all, and reuse what is equal.
        return _Turn(tokenizer.encode(text, add_special_tokens=False), text)

    def _plain_ids(self, sent: Mapping[str, Any]) -> list[int]:
        content = sent.get("content")
        if not isinstance(content, str) or not content:
            raise PromptError("without a chat template a message is a non-empty text")
        if not self._ids:
            return encode_text(content, self._tokenizer)
        return [*self._ids, *self._tokenizer.encode(content, add_special_tokens=False)]

    def _remember(self, turn: _Turn, response: GenerationResponse, reply: str) -> None:
        """Note the ids and the text that stand now, as if no further token followed."""
        generated = response.token_ids
        if response.finish_reason == "stop":
            if isinstance(response.stop_reason, str):
                # The tokens hold more than the text that was shown.
                generated = self._tokenizer.encode(reply, add_special_tokens=False) if reply else []
            else:
                generated = generated[:-1]
        self._ids = [*turn.ids, *generated]
        self._written = None if turn.text is None else turn.text + reply

"""A conversation: one session that grows turn by turn and feeds nothing twice."""

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from turbospark.errors import PromptError, UnsupportedError
from turbospark.runner.generation import Generation, admit, collect, run
from turbospark.runner.options import read_options
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.runner.transcript import Transcript, Turn, as_message
from turbospark.runner.turns import begun

if TYPE_CHECKING:
    from turbospark.runner.conversations import Conversations

_REFUSED = {
    "prompt_cache": "a conversation owns its caches; leave it out",
    "draft_model": "what drafts is chosen by load(..., draft=...); leave it out",
}
_GIVEN_BACK = (
    "its caches were given back to keep idle conversations within session_bytes, so all of it is "
    "fed again"
)


class Conversation:
    """Messages, and the ids behind them. A `with` statement closes it.

    With a chat template every message is a turn of it; without one, what is sent is text that
    continues the text so far. Any thread may send; a message waits for the reply to the one
    before it.

    Args:
        name: shown in messages.
        runner: over a session of its own.
        transcript: what was said before.
        home: the conversations of its engine.
        given_back: whether its caches were dropped to keep within the byte budget.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        transcript: Transcript,
        home: "Conversations",
        *,
        given_back: bool = False,
    ) -> None:
        self.name = name
        self.runner = runner
        self._transcript = transcript
        self._home = home
        self._closed = False
        self._sending = threading.RLock()
        self._replying: object = None
        self._given_back = given_back

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.messages)} messages"
        return f"Conversation({self.name!r}, {state}, {self.runner.session!r})"

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self!r} cannot be copied or pickled: its caches belong to this process; `fork` or "
            "`save` it, or keep its `messages`"
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

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Every message so far, replies included."""
        return self._transcript.messages

    @property
    def nbytes(self) -> int:
        """Bytes that its session has allocated; rows that forks share count in each of them."""
        return self.runner.session.nbytes

    def send(self, message: str | Mapping[str, Any], **options: Any) -> GeneratedText:
        """Send a message and return the whole reply.

        Args:
            message: the user's text, or a message with a role of its own.
            options: as for `Engine.generate`.

        Raises:
            PromptError: the conversation is closed or the message is empty; nothing has moved.
            ContextLengthError: it does not fit; nothing has moved.
        """
        with self._sending:
            return collect(self.stream(message, **options))

    def stream(
        self, message: str | Mapping[str, Any], **options: Any
    ) -> Iterator[GenerationResponse]:
        """Send a message and give the reply token by token.

        Closing the iterator keeps the reply as far as it was given; closing it before the first
        token, or a failure, leaves the conversation without this message.
        """
        read = read_options(options, refused=_REFUSED)
        self._check_open()
        sent, home = as_message(message), self._home
        turn = self._transcript.next_turn(sent, home.tokenizer)
        generation = admit(
            self.runner,
            home.tokenizer,
            turn.ids,
            read,
            stop_ids=home.serving.stop_ids,
            chunk=home.serving.chunk,
        )
        return begun(self._responses(sent, turn, generation, self._transcript.ids), self._sending)

    def reset(self) -> None:
        """Forget every message and start over; a reply in progress ends."""
        with self.runner.lock:
            self._end_reply()
            self._transcript = Transcript()
            self._given_back = False
            self.runner.session.reset()

    def close(self) -> None:
        """Give the memory back; the conversation takes no more messages and its name is free."""
        self.reset()
        self._closed = self.runner.session.closed = True
        self._home.close(self)

    def fork(self, name: str = "") -> "Conversation":
        """A second conversation that has said the same so far; a reply in progress ends.

        Both go on alone. Rows of the caches are shared until one side writes.

        Raises:
            PromptError: the conversation is closed.
            OptionError: an open conversation has that name.
        """
        with self.runner.lock:
            self._check_open()
            self._end_reply()
            session, transcript = self.runner.session.fork(), self._transcript.copy()
            return self._home.fork(session, transcript, name, given_back=self._given_back)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a file, for `Engine.load_session`; a reply in progress ends.

        Args:
            path: what stands there is replaced once the new file is whole.

        Raises:
            PromptError: the conversation is closed.
            OptionError: the place cannot be written, or a message is nothing that JSON can hold.
            CheckpointError: a forward pass failed in it.
        """
        with self.runner.lock:
            self._check_open()
            self._end_reply()
            self._home.save(
                path, self.name, self.runner, self._transcript, given_back=self._given_back
            )

    def give_back(self) -> bool:
        """Drop the caches; the next message feeds all of the text again, and says so.

        Returns:
            False, with nothing dropped, while a reply is in progress.
        """
        with self.runner.lock:
            if self._replying is not None:
                return False
            self.runner.session.reset()
            self._given_back = True
            return True

    def _responses(
        self, sent: dict[str, Any], turn: Turn, generation: Generation, said: list[int]
    ) -> Iterator[GenerationResponse]:
        mine = object()
        reply: list[str] = []
        with self.runner.lock:
            self._check_open()
            if self._transcript.ids is not said:
                raise PromptError(f"{self!r} has gone on since this message; send it again")
            transcript, before = self._transcript, len(self.messages)
            self._replying = mine
            changed: dict[str, Any] = {}
            if self._home.budget.use(self):
                changed["evicted"] = True
            if self._given_back:
                changed["reuse_reason"] = _GIVEN_BACK
            self._given_back = False

        def remember(response: GenerationResponse) -> None:
            reply.append(response.text)
            answer = {"role": "assistant", "content": "".join(reply)}
            transcript.messages[before:] = [sent, answer]
            transcript.answered(turn, response, answer["content"], self._home.tokenizer)

        try:
            yield from noted(run(self.runner, generation, on_step=remember), changed)
        finally:
            if self._replying is mine:
                self._replying = None

    def _end_reply(self) -> None:
        self.runner.begin_turn()
        self._replying = None

    def _check_open(self) -> None:
        if self._closed:
            raise PromptError(f"{self!r} takes no more messages; open another session")


def noted(
    responses: Iterator[GenerationResponse], changes: Mapping[str, Any]
) -> Iterator[GenerationResponse]:
    """Responses with some fields replaced."""
    if not changes:
        yield from responses
        return
    for response in responses:
        yield replace(response, **changes)

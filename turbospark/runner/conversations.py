"""The conversations of one engine: named ones are kept, and all of them share a byte budget."""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.errors import CheckpointError, OptionError
from turbospark.runner.conversation import Conversation, noted
from turbospark.runner.prompt import TextCodec
from turbospark.runner.results import GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.runner.serving import Serving
from turbospark.runner.transcript import Transcript
from turbospark.sessions.budget import ByteBudget
from turbospark.sessions.file import read_file, write_file
from turbospark.sessions.fingerprint import Fingerprint, differences, drafter_identity
from turbospark.sessions.saved import check_ids, check_kinds, export_session, restore_session
from turbospark.sessions.session import Session


class Parked:
    """The parked sessions of a runner, as the byte budget sees them: they go together."""

    def __init__(self, runner: Runner) -> None:
        self._pool = runner.pool
        self.lock = runner.lock

    @property
    def nbytes(self) -> int:
        """Bytes of the parked sessions."""
        return self._pool.nbytes - self._pool.live.nbytes

    def give_back(self) -> bool:
        """Drop them all."""
        self._pool.drop_parked()
        return True


class Named(dict[str, Conversation]):
    """Open conversations by name. The engine holds them: they go with it."""


class Conversations:
    """Opens, keeps, saves and restores conversations.

    Args:
        tokenizer: the model's.
        serving: how it runs.
        named: where those with a name are kept; held weakly.
        new_runner: makes a runner over the session given, or over a new one.
        identity: gives the model's fingerprint; asked for when a file is written or read.
        lock: held by every step of every runner, and here.

    Attributes:
        budget: what conversations that are not in use may keep.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        serving: Serving,
        named: Named,
        new_runner: Callable[[Session | None], Runner],
        identity: Callable[[], Fingerprint],
        lock: AbstractContextManager[Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.serving = serving
        self.budget = ByteBudget(serving.idle_bytes)
        self._new_runner = new_runner
        self._identity = identity
        self._kept = weakref.ref(named)
        self._lock = lock

    @property
    def _named(self) -> Named:
        named = self._kept()
        return Named() if named is None else named

    def open(self, name: str) -> Conversation:
        """The open conversation of a name, or a new one; without a name always a new one.

        Raises:
            OptionError: the name is no text.
        """
        _check_text(name)
        with self._lock:
            return self._named.get(name) or self._adopted(name, self._new_runner(None))

    def fork(
        self, session: Session, transcript: Transcript, name: str, *, given_back: bool
    ) -> Conversation:
        """A conversation over a session that was forked.

        Raises:
            OptionError: the name is taken.
        """
        with self._lock:
            self._check_free(name)
            return self._adopted(name, self._new_runner(session), transcript, given_back)

    def counted(
        self, anonymous: "Parked", responses: Iterator[GenerationResponse]
    ) -> Iterator[GenerationResponse]:
        """Responses of an anonymous conversation, for which idle ones make room."""
        with anonymous.lock:
            evicted = self.budget.use(anonymous, anonymous.nbytes)
        yield from noted(responses, {"evicted": True} if evicted else {})

    def close(self, conversation: Conversation) -> None:
        """Forget a conversation; its name is free again."""
        with self._lock:
            self.budget.forget(conversation)
            if self._named.get(conversation.name) is conversation:
                del self._named[conversation.name]

    def save(
        self,
        path: str | os.PathLike[str],
        name: str,
        runner: Runner,
        transcript: Transcript,
        *,
        given_back: bool,
    ) -> None:
        """Write a conversation that stands between two turns.

        Raises:
            OptionError: the place cannot be written, or a message is nothing that JSON can hold.
            CheckpointError: a forward pass failed in it.
        """
        values, arrays = export_session(runner.session, drafter_identity(runner.drafter))
        values |= {
            "name": name,
            "fingerprint": self._identity(),
            "messages": transcript.messages,
            "written": transcript.written,
            "given_back": given_back,
        }
        write_file(path, values, {**arrays, "ids": _as_array(transcript.ids)})

    def load(self, path: str | os.PathLike[str], name: str | None) -> Conversation:
        """Read what `save` wrote; nothing has changed where it is refused.

        Raises:
            OptionError: the name is taken.
            SourceError: no file is there.
            CheckpointError: it is damaged, or was saved under something else; it says what.
        """
        values, arrays = read_file(path)
        try:
            check_kinds(values, arrays)
        except CheckpointError as error:
            raise CheckpointError(f"{os.fspath(path)} is damaged: {error}") from error
        wanted: str = values["name"] if name is None else name
        with self._lock:
            self._check_free(wanted)
            other = differences(values["fingerprint"], self._identity())
            if other:
                raise CheckpointError(
                    f"{os.fspath(path)} was saved under another model: what differs is "
                    f"{', '.join(other)}. Load what it was saved with, or send its messages anew"
                )
            runner = self._new_runner(None)
            try:
                check_ids(arrays, runner.model.vocab_size)
                restore_session(runner.session, drafter_identity(runner.drafter), values, arrays)
            except CheckpointError as error:
                raise CheckpointError(f"{os.fspath(path)} cannot go on here: {error}") from error
            ids: list[int] = np.asarray(arrays["ids"]).tolist()
            transcript = Transcript(values["messages"], ids, values["written"])
            return self._adopted(wanted, runner, transcript, values.get("given_back", False))

    def _adopted(
        self,
        name: str,
        runner: Runner,
        transcript: Transcript | None = None,
        given_back: bool = False,
    ) -> Conversation:
        said = transcript or Transcript()
        conversation = Conversation(name, runner, said, self, given_back=given_back)
        if name:
            self._named[name] = conversation
        return conversation

    def _check_free(self, name: str) -> None:
        _check_text(name)
        if name in self._named:
            raise OptionError(
                f"a conversation named {name!r} is open: close it, or give another name"
            )


def _check_text(name: object) -> None:
    if not isinstance(name, str):
        raise OptionError(f"a conversation's name of type {type(name).__name__}: give text")


def _as_array(ids: list[int]) -> Any:
    return mx.array(np.array(ids, dtype=np.int32))

"""A loaded model and its conversations."""

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from turbospark.errors import UnsupportedError
from turbospark.loading.build import LoadedModel
from turbospark.loading.plan import free_bytes
from turbospark.loading.planned import megabytes
from turbospark.protocols import CausalModel, Drafter
from turbospark.runner.conversation import Conversation
from turbospark.runner.conversations import Conversations, Named, Parked
from turbospark.runner.drafting import choose_policy
from turbospark.runner.generation import admit, collect, run
from turbospark.runner.options import read_options
from turbospark.runner.prompt import prompt_ids
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.runner.serving import Serving, decide, remember, session_maker
from turbospark.runner.turns import TurnLock, begun
from turbospark.sessions.fingerprint import fingerprint
from turbospark.sessions.pool import SessionPool
from turbospark.sessions.session import Session
from turbospark.settings import RunnerConfig
from turbospark.speculation.off import NoDrafter

_LOG = logging.getLogger("turbospark")
_REFUSED = {
    "prompt_cache": "an engine keeps its caches itself; use engine.session() instead",
    "draft_model": "what drafts is chosen by load(..., draft=...); leave it out",
}


class Engine:
    """A loaded model with conversations of its own. Unpacks as (model, tokenizer).

    Attributes:
        model: the family's model.
        tokenizer: the checkpoint's own.
        model_config: config.json, or what a GGUF file says in its words.
        config: how prompts are fed and sessions kept.
        kernels: the kernel bodies that run.
        drafter: what proposes tokens; one named "off" where nothing does.
        runner: the producer behind `generate` and `stream`, for scripts that drive it themselves.
    """

    def __init__(
        self, loaded: LoadedModel, config: RunnerConfig, drafter: Drafter | None = None
    ) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.config
        self.source: Path = loaded.source
        self.kernels = loaded.kernels
        self.bodies = loaded.bodies
        self.config = config
        self.drafter = drafter or NoDrafter()
        self._serving = decide(loaded.model, config, loaded.stop_ids, free_bytes())
        remember(loaded.model, self._serving, loaded.tokenizer)
        new_runner = _runner_maker(self.model, self._serving, self.drafter)
        self._new_runner = new_runner
        self.runner = new_runner(None, config.session_slots - 1, config.prefix_reuse)
        model, model_config, tokenizer = loaded.model, loaded.config, loaded.tokenizer
        self._named = Named()
        self._conversations = Conversations(
            self.tokenizer,
            self._serving,
            self._named,
            lambda session: new_runner(session, 0, config.prefix_reuse),
            functools.cache(lambda: fingerprint(model, model_config, tokenizer)),
            self.runner.lock,
        )
        self._parked = Parked(self.runner)
        self._whole = threading.RLock()
        self._told = False
        if config.session_slots > 1:
            self._tell()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __repr__(self) -> str:
        return (
            f"Engine({str(self.source)!r}, {type(self.model).__name__}, "
            f"max_context={self.max_context}, {self.kernels.describe()})"
        )

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "an Engine cannot be copied or pickled: its weights and kernels belong to this "
            "process; load the model where it is needed, or open engine.session() for a "
            "conversation of its own"
        )

    @property
    def max_context(self) -> int:
        """Tokens a session may hold."""
        return self._serving.max_context

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return self._serving.stop_ids

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens of one forward pass."""
        return self._serving.chunk

    @property
    def session_bytes(self) -> int:
        """Bytes that conversations which are not in use may keep."""
        return self._serving.idle_bytes

    def generate(self, prompt: Any, **options: Any) -> GeneratedText:
        """Generate a text.

        It is one of `session_slots` anonymous conversations: a prompt that continues the text of
        one of them feeds only what is new, whoever asked in between.

        Args:
            prompt: text; token ids; or a list of messages, for which the chat template is used.
            options: max_tokens, temperature, top_p, top_k, min_p, repetition_penalty,
                presence_penalty, frequency_penalty, seed, stop, stop_token_ids, logprobs,
                logit_bias, sampler, logits_processors, prefill_chunk, prompt_progress_callback,
                draft ("off" leaves drafting out), draft_block.

        Returns:
            a str; every field of `GenerationResponse` is an attribute of it.

        Raises:
            OptionError: an option is unknown, out of range or cannot be honoured.
            PromptError: the prompt is empty, no prompt, or too long. Nothing has moved.
            ProducerError: a forward pass failed; the next call starts over.
        """
        with self._whole:
            return collect(self.stream(prompt, **options))

    def stream(self, prompt: Any, **options: Any) -> Iterator[GenerationResponse]:
        """Generate a text token by token; arguments and errors as for `generate`.

        Everything that can be refused is refused here, before the first step. The iterator may
        be closed at any token; a later call on this engine ends it. It waits for a `generate` of
        another thread.
        """
        read = read_options(options, refused=_REFUSED)
        ids = prompt_ids(prompt, self.tokenizer, self.model.vocab_size)
        serving = self._serving
        generation = admit(
            self.runner, self.tokenizer, ids, read, stop_ids=serving.stop_ids, chunk=serving.chunk
        )
        responses = self._conversations.counted(self._parked, run(self.runner, generation))
        return begun(responses, self._whole)

    def session(self, name: str = "") -> Conversation:
        """Open a conversation: caches of its own, reused turn after turn.

        Args:
            name: the same name gives the same conversation, until it is closed, from whatever
                part of a program it is asked for; the engine keeps it. Without a name it is a new
                one each time, which lives as long as somebody holds it.

        Raises:
            OptionError: the name is no text.
        """
        self._tell()
        return self._conversations.open(name)

    def load_session(self, path: str | os.PathLike[str], name: str | None = None) -> Conversation:
        """Open a conversation that `Conversation.save` wrote; it goes on as if never saved.

        Args:
            path: the file.
            name: of the conversation; by default the one it was saved under.

        Raises:
            SourceError: no file is there.
            CheckpointError: the file is damaged, or was saved under another model, quantization,
                tokenizer or kind of cache; the message says what differs.
            OptionError: an open conversation has that name.
        """
        self._tell()
        return self._conversations.load(path, name)

    def new_runner(self, *, prefix_reuse: bool = False) -> Runner:
        """A producer over a session of its own, for scripts that measure or drive one."""
        return self._new_runner(None, 0, prefix_reuse)

    def _tell(self) -> None:
        """Say once what idle conversations may keep, as soon as there can be one."""
        if not self._told:
            self._told = True
            _LOG.info("idle conversations may keep %s", megabytes(self.session_bytes))


RunnerMaker = Callable[[Session | None, int, bool], Runner]


def _runner_maker(model: CausalModel, serving: Serving, drafter: Drafter) -> RunnerMaker:
    """What makes runners of one engine; it holds no engine, so that one goes when it is dropped.

    Returns:
        (live session or None for a new one, parked sessions at most, prefix reuse) -> runner.
    """
    # One step at a time: what several threads ask for takes turns, token by token.
    lock = TurnLock()
    new_session = session_maker(model, serving)
    block = serving.config.draft_block

    def make(session: Session | None, parked: int, prefix_reuse: bool) -> Runner:
        pool = SessionPool(new_session, parked, parked_bytes=serving.idle_bytes, live=session)
        runner = Runner(
            model, pool, drafter, prefix_reuse=prefix_reuse, prefer_reuse=True, lock=lock
        )
        if block is not None:
            runner.block_policy = choose_policy(runner, block)
        return runner

    return make

"""Where loading meets running: `load`, `Engine`, and functions with mlx-lm's names."""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from turbospark.errors import OptionError, UnsupportedError
from turbospark.kernels.device import on_cpu
from turbospark.loading.build import LoadedModel, load_model
from turbospark.loading.plan import Plan, free_bytes
from turbospark.loading.plan import plan as plan_memory
from turbospark.protocols import CausalModel
from turbospark.runner.context import choose_max_context, row_bytes
from turbospark.runner.conversation import Conversation
from turbospark.runner.generation import Generation, admit, collect, run
from turbospark.runner.options import CallOptions, read_options
from turbospark.runner.prompt import TextCodec, prompt_ids
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.sampling.select import check_callable
from turbospark.sessions.session import Session
from turbospark.settings import (
    UNBUILT,
    KernelPolicy,
    LoadConfig,
    RunnerConfig,
    option_names,
    refuse_unbuilt,
    resolve,
    unknown_option,
)

DEFAULT_MODEL = "demo"
_LOG = logging.getLogger("turbospark")
_NO_CACHE = {"prompt_cache": "an engine keeps its caches itself; use engine.session() instead"}


@dataclass(frozen=True, slots=True)
class Serving:
    """What running a loaded model needs to know beside its weights."""

    config: RunnerConfig
    stop_ids: frozenset[int]
    chunk: int
    max_context: int


class Engine:
    """A loaded model with one live conversation of its own. Unpacks as (model, tokenizer).

    Attributes:
        model: the family's model.
        tokenizer: the checkpoint's own.
        model_config: config.json, or what a GGUF file says in its words.
        config: how prompts are fed and sessions kept.
        kernels: the kernel bodies that run.
        runner: the producer behind `generate` and `stream`, for scripts that drive it themselves.
    """

    def __init__(self, loaded: LoadedModel, config: RunnerConfig) -> None:
        if config.session_slots > 1:
            raise OptionError(
                f"session_slots={config.session_slots}: parked conversations are not built yet; "
                "open engine.session() for each conversation"
            )
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.config
        self.source: Path = loaded.source
        self.kernels = loaded.kernels
        self.bodies = loaded.bodies
        self.config = config
        self._serving = _serving(loaded.model, config, loaded.stop_ids)
        _remember(loaded.model, self._serving)
        session = _new_session(loaded.model, self._serving)
        self.runner = Runner(loaded.model, session, prefix_reuse=config.prefix_reuse)

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

    def generate(self, prompt: Any, **options: Any) -> GeneratedText:
        """Generate a text.

        Args:
            prompt: text; token ids; or a list of messages, for which the chat template is used.
            options: max_tokens, temperature, top_p, top_k, min_p, repetition_penalty,
                presence_penalty, frequency_penalty, seed, stop, stop_token_ids, logprobs,
                logit_bias, sampler, logits_processors, prefill_chunk, prompt_progress_callback.

        Returns:
            a str; every field of `GenerationResponse` is an attribute of it.

        Raises:
            OptionError: an option is unknown, out of range or cannot be honoured.
            PromptError: the prompt is empty, no prompt, or too long. Nothing has moved.
            ProducerError: a forward pass failed; the next call starts over.
        """
        with self.runner.lock:
            return collect(self.stream(prompt, **options))

    def stream(self, prompt: Any, **options: Any) -> Iterator[GenerationResponse]:
        """Generate a text token by token; arguments and errors as for `generate`.

        Everything that can be refused is refused here, before the first step. The iterator may
        be closed at any token; a later call on this engine ends it.
        """
        read = read_options(options, refused=_NO_CACHE)
        return run(self.runner, self._admit(prompt, read))

    def session(self, name: str = "") -> Conversation:
        """Open a conversation: caches of its own, reused turn after turn."""
        serving = self._serving
        runner = Runner(self.model, _new_session(self.model, serving), prefix_reuse=True)
        return Conversation(
            name, runner, self.tokenizer, stop_ids=serving.stop_ids, chunk=serving.chunk
        )

    def _admit(self, prompt: Any, options: CallOptions) -> Generation:
        ids = prompt_ids(prompt, self.tokenizer, self.model.vocab_size)
        return _admitted(self.runner, self.tokenizer, ids, options, self._serving)


def load(
    path_or_repo: str | os.PathLike[str] | None = None,
    *,
    policy: KernelPolicy | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Engine:
    """Load a model.

    Args:
        path_or_repo: a folder, a .gguf file, a Hub id, or "demo"; None is the demo model.
        policy: which kernel bodies run; or give its options by name.
        progress: called with bytes done and bytes in all.
        options: quantize, dequantize, revision, local_files_only; max_context, prefill_chunk,
            ring_slack, session_slots, prefix_reuse; kernels, activations, isa, threads, cxx;
            draft, draft_block, residency, kv_bits and device are reserved.

    Raises:
        OptionError: an option is unknown (the nearest is named) or cannot be honoured.
        SourceError: no checkpoint is there.
        ConfigError: its configuration is damaged or not implemented.
        CheckpointError: its weights are damaged.
        TokenizerError: its tokenizer is damaged.
    """
    tables = {kind: option_names(kind) for kind in (LoadConfig, RunnerConfig, KernelPolicy)}
    rest = refuse_unbuilt(options)
    known = {name for names in tables.values() for name in names}
    for name in rest:
        if name not in known:
            raise unknown_option(name, known | set(UNBUILT) | {"policy", "progress"})
    kernel_options = _of(rest, tables[KernelPolicy])
    if policy is not None and not isinstance(policy, KernelPolicy):  # type: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"policy of type {type(policy).__name__}: give a KernelPolicy")
    if progress is not None:
        check_callable("progress", progress)
    if policy is not None and kernel_options:
        raise OptionError(f"policy and {', '.join(kernel_options)} exclude each other")
    config = resolve(RunnerConfig, _of(rest, tables[RunnerConfig]))
    source = resolve(LoadConfig, _of(rest, tables[LoadConfig]))
    loaded = load_model(
        DEFAULT_MODEL if path_or_repo is None else path_or_repo,
        quantize=source.quantize,
        dequantize=source.dequantize,
        revision=source.revision,
        local_files_only=source.local_files_only,
        policy=policy or resolve(KernelPolicy, kernel_options),
        progress=progress,
    )
    return Engine(loaded, config)


def stream_generate(
    model: Any, tokenizer: Any, prompt: Any, max_tokens: int = 256, **options: Any
) -> Iterator[GenerationResponse]:
    """Generate token by token, with mlx-lm's argument names; nothing is kept between calls.

    Args:
        model: an Engine, or the model that `load` gave.
        tokenizer: the tokenizer that `load` gave.
        prompt: text, token ids or messages. With `prompt_cache` it continues that session.
        max_tokens: tokens to generate at most; -1 fills the context.
        options: as for `Engine.generate`, and `prompt_cache` from `make_prompt_cache`.

    Raises:
        OptionError: an option is unknown, or cannot be honoured here.
        PromptError: the prompt cannot be run; nothing has moved.
    """
    read = read_options({"max_tokens": max_tokens, **options})
    model = _model_of(model)
    if not isinstance(tokenizer, TextCodec):
        raise OptionError(
            f"a tokenizer of type {type(tokenizer).__name__}: give the one that `load` gave"
        )
    serving = _known(model, tokenizer)
    ids = prompt_ids(prompt, tokenizer, model.vocab_size)
    session = read.prompt_cache
    if session is None:
        runner = Runner(model, _new_session(model, serving))
        return run(runner, _admitted(runner, tokenizer, ids, read, serving))
    if not isinstance(session, Session):
        raise OptionError(
            f"prompt_cache of type {type(session).__name__}: make it with "
            "turbospark.make_prompt_cache(model)"
        )
    runner = Runner(model, session, prefix_reuse=True)
    return run(runner, _admitted(runner, tokenizer, [*session.text_ids, *ids], read, serving))


def generate(
    model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **options: Any
) -> GeneratedText:
    """Generate a text, with mlx-lm's argument names.

    Args:
        model: an Engine, or the model that `load` gave.
        tokenizer: the tokenizer that `load` gave.
        prompt: text, token ids or messages.
        verbose: print the text as it comes, and counts and rates after it.
        options: as for `stream_generate`.
    """
    responses = stream_generate(model, tokenizer, prompt, **options)
    if not verbose:
        return collect(responses)
    return collect(_printed(responses))


def make_prompt_cache(model: Any, max_context: int | None = None) -> Session:
    """An empty session to give to `generate` as `prompt_cache`, call after call."""
    model = _model_of(model)
    serving = _known(model, None)
    limit = serving.max_context if max_context is None else max_context
    slack = serving.config.ring_slack
    return Session(lambda: cast("list[Any]", model.make_caches(limit, slack)), limit)


def plan(path_or_repo: str | os.PathLike[str] | None = None, **options: Any) -> Plan:
    """Say what a model needs and whether it fits here; no weights are downloaded or read.

    Args:
        path_or_repo: as for `load`.
        options: context, sessions, quantize, revision and dequantize.

    Returns:
        the numbers; its `repr` shows the arithmetic and the verdict.

    Raises:
        OptionError: an option is unknown (the nearest is named) or out of range.
        SourceError: no checkpoint is there.
    """
    known = ("context", "sessions", "quantize", "revision", "dequantize")
    for name, value in options.items():
        if name not in known:
            raise unknown_option(name, known)
        if name in {"context", "sessions"} and (not isinstance(value, int) or value < 1):
            raise OptionError(f"{name}={value!r} is not a whole number above 0")
    return plan_memory(DEFAULT_MODEL if path_or_repo is None else path_or_repo, **options)


def _printed(responses: Iterator[GenerationResponse]) -> Iterator[GenerationResponse]:
    last = None
    for response in responses:
        print(response.text, end="", flush=True)  # noqa: T201  # what `verbose` asks for
        last = response
        yield response
    print()  # noqa: T201
    if last is not None:
        print(last.summary())  # noqa: T201


def _admitted(
    runner: Runner, tokenizer: TextCodec, ids: list[int], options: CallOptions, serving: Serving
) -> Generation:
    return admit(runner, tokenizer, ids, options, stop_ids=serving.stop_ids, chunk=serving.chunk)


def _new_session(model: CausalModel, serving: Serving) -> Session:
    context, slack = serving.max_context, serving.config.ring_slack
    return Session(lambda: model.make_caches(context, slack), context)


def _serving(model: CausalModel, config: RunnerConfig, stop_ids: frozenset[int]) -> Serving:
    trained = model.max_position
    context = choose_max_context(
        config.max_context, trained, row_bytes(model.make_caches(1, 0)), free_bytes()
    )
    if trained is not None and context > trained:
        _LOG.warning(
            "max_context=%d is more than the %d tokens the model was trained for", context, trained
        )
    chunk = config.prefill_chunk or (256 if on_cpu() else 2048)
    return Serving(config, stop_ids, chunk, context)


_SERVED: dict[int, Serving] = {}
"""By id of a living model: what `load` found out and `(model, tokenizer)` does not carry."""


def _remember(model: Any, serving: Serving) -> None:
    _SERVED[id(model)] = serving
    weakref.finalize(model, _SERVED.pop, id(model), None)


def _known(model: Any, tokenizer: Any) -> Serving:
    serving = _SERVED.get(id(model))
    if serving is None:
        stop_ids = frozenset[int]() if tokenizer is None else frozenset[int](tokenizer.eos_ids)
        serving = _serving(model, resolve(RunnerConfig), stop_ids)
    return serving


def _model_of(model: Any) -> Any:
    model = model.model if isinstance(model, Engine) else model
    if not all(hasattr(model, name) for name in ("make_caches", "vocab_size", "max_position")):
        raise OptionError(f"a model of type {type(model).__name__}: give the one that `load` gave")
    return model


def _of(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}

"""What users call: `load`, and functions with mlx-lm's names."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from turbospark.checkpoints import DEFAULT_MODEL, inspect, plan
from turbospark.engine import Engine
from turbospark.errors import OptionError, PromptError
from turbospark.loading.build import load_model
from turbospark.loading.drafters import load_drafter
from turbospark.loading.plan import free_bytes
from turbospark.protocols import Drafter
from turbospark.runner.generation import admit, collect, run
from turbospark.runner.options import read_options
from turbospark.runner.prompt import TextCodec, prompt_ids
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.runner.serving import Serving, check_model, recall, session_maker, tokenizer_of
from turbospark.sampling.select import check_callable
from turbospark.sessions.pool import SessionPool
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
from turbospark.speculation.model import ModelDrafter
from turbospark.speculation.off import NoDrafter
from turbospark.speculation.tokenizers import check_same_tokens

__all__ = [
    "DEFAULT_MODEL",
    "Engine",
    "generate",
    "inspect",
    "load",
    "make_prompt_cache",
    "plan",
    "stream_generate",
]


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
            ring_slack, session_slots, session_bytes, prefix_reuse, checkpoint_bytes,
            checkpoint_every; draft ("auto", "off", "ngram", "mtp", or the path or Hub id of a
            block drafter or of a smaller model), draft_block; kernels, activations, isa,
            threads, cxx; residency, kv_bits and device are reserved.

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
    if isinstance(rest.get("draft"), os.PathLike):
        rest["draft"] = os.fspath(rest["draft"])
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
    drafter = load_drafter(
        config.draft,
        loaded,
        quantize=source.quantize,
        local_files_only=source.local_files_only,
        progress=progress,
    )
    return Engine(loaded, config, drafter)


def stream_generate(
    model: Any, tokenizer: Any, prompt: Any, max_tokens: int = 256, **options: Any
) -> Iterator[GenerationResponse]:
    """Generate token by token, with mlx-lm's argument names; nothing is kept between calls.

    Args:
        model: an Engine, or the model that `load` gave.
        tokenizer: the tokenizer that `load` gave.
        prompt: text, token ids or messages. With `prompt_cache` it continues that session.
        max_tokens: tokens to generate at most; -1 fills the context.
        options: as for `Engine.generate`; `prompt_cache` from `make_prompt_cache`; `draft_model`,
            a smaller model that `load` gave, and `num_draft_tokens`.

    Raises:
        OptionError: an option is unknown, or cannot be honoured here, or prompt_cache is of
            another model.
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
    if session is not None and not isinstance(session, Session):
        raise OptionError(
            f"prompt_cache of type {type(session).__name__}: make it with "
            "turbospark.make_prompt_cache(model)"
        )
    if session is not None:
        session.check_model(model)
        _refuse_said_again(session, ids)
        session.settle()  # a reply left standing on it is text, as far as it was given
    drafter = _drafter_of(read.draft_model, model, tokenizer, session)
    runner = _new_runner(model, serving, session, drafter, reuse=session is not None)
    text = ids if session is None else [*session.text_ids, *ids]
    return run(
        runner,
        admit(runner, tokenizer, text, read, stop_ids=serving.stop_ids, chunk=serving.chunk),
    )


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
    return session_maker(model, _known(model, None), max_context)()


def _printed(responses: Iterator[GenerationResponse]) -> Iterator[GenerationResponse]:
    last = None
    for response in responses:
        print(response.text, end="", flush=True)  # noqa: T201  # what `verbose` asks for
        last = response
        yield response
    print()  # noqa: T201
    if last is not None:
        print(last.summary())  # noqa: T201


def _new_runner(
    model: Any, serving: Serving, session: Session | None, drafter: Drafter, *, reuse: bool
) -> Runner:
    pool = SessionPool(session_maker(model, serving), live=session)
    return Runner(model, pool, drafter, prefix_reuse=reuse, prefer_reuse=True)


def _refuse_said_again(session: Session, ids: list[int]) -> None:
    said = session.text_ids
    if len(said) > 1 and ids[: len(said)] == said:
        raise PromptError(
            f"the prompt begins with all {len(said)} tokens that prompt_cache holds, which would "
            "stand in the text twice: give only what is new, or use Engine.generate, which finds "
            "out by itself"
        )


_DRAFTED: "weakref.WeakKeyDictionary[Session, Any]" = weakref.WeakKeyDictionary()
"""Which model drafted in a prompt cache last: its rows are of no use to another one."""


def _drafter_of(draft_model: Any, model: Any, tokenizer: Any, session: Session | None) -> Drafter:
    if session is not None and _DRAFTED.get(session) is not draft_model:
        session.make_drafter_state = session.drafter_state = None
        _DRAFTED[session] = draft_model
    if draft_model is None:
        return NoDrafter("no draft_model was given")
    draft_tokenizer = draft_model.tokenizer if isinstance(draft_model, Engine) else None
    draft_model = _model_of(draft_model)
    draft_tokenizer = draft_tokenizer or tokenizer_of(draft_model)
    if draft_tokenizer is not None:
        check_same_tokens(tokenizer, draft_tokenizer)
    return ModelDrafter(draft_model, model.vocab_size)


def _known(model: Any, tokenizer: Any) -> Serving:
    return recall(model, tokenizer, free_bytes())


def _model_of(model: Any) -> Any:
    model = model.model if isinstance(model, Engine) else model
    check_model(model)
    return model


def _of(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}

"""Keywords of a call, read once: every one is honoured or refused by name."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from turbospark.errors import OptionError
from turbospark.runner.loops import Progress
from turbospark.sampling.select import LogitsProcessor, Sampler
from turbospark.settings import (
    UNBUILT,
    GenerationConfig,
    RunnerConfig,
    option_names,
    refuse_unbuilt,
    resolve,
    unknown_option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a call asks for beside its prompt.

    Attributes:
        generation: budget, sampling and stops.
        prefill_chunk: tokens of one prompt pass, or None for the model's own size.
        draft: "off" for a call without drafting, or None.
        draft_block: tokens proposed in one round, or None for what was loaded with.
        logit_bias: token id to a number added to its logit.
        sampler: replaces the built-in sampling.
        logits_processors: run on each row before sampling.
        prompt_progress_callback: called with (done, total); returning False cancels.
        stop_token_ids: ids that end the text beside the model's own.
        prompt_cache: a session that the prompt continues.
        draft_model: a smaller model that proposes tokens.
    """

    generation: GenerationConfig
    prefill_chunk: int | None = None
    draft: str | None = None
    draft_block: int | None = None
    logit_bias: Mapping[int, float] | None = None
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    prompt_progress_callback: Progress | None = None
    stop_token_ids: Collection[int] | None = None
    prompt_cache: Any = None
    draft_model: Any = None


_OF_RUNNER = ("prefill_chunk", "draft", "draft_block")
_CALL_ONLY = tuple(
    item.name for item in fields(CallOptions) if item.name not in {"generation", *_OF_RUNNER}
)
_MLX_LM_DRAFT_TOKENS = 2


def read_options(
    given: Mapping[str, Any], *, refused: Mapping[str, str] | None = None
) -> CallOptions:
    """Sort a call's keywords.

    Args:
        given: keyword to value; None means not given.
        refused: keywords this path cannot honour, with the reason.

    Raises:
        OptionError: a keyword is unknown (the nearest one is named), is refused on this path,
            belongs to a feature that is not built yet, or has a value out of range.
    """
    for name, reason in (refused or {}).items():
        if given.get(name) is not None:
            raise OptionError(f"{name}: {reason}")
    given = refuse_unbuilt(given)
    of_generation = option_names(GenerationConfig)
    of_runner = [name for name, own in option_names(RunnerConfig).items() if own in _OF_RUNNER]
    known = {*of_generation, *of_runner, *_CALL_ONLY}
    for name in given:
        if name not in known:
            raise unknown_option(name, known | set(UNBUILT))
    return CallOptions(
        generation=resolve(GenerationConfig, _only(given, of_generation)),
        **_runner_options(given, of_runner),
        **_only(given, _CALL_ONLY),
    )


def _runner_options(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    wanted = {name: value for name, value in _only(given, names).items() if value is not None}
    if given.get("draft_model") is None and wanted.get("num_draft_tokens") == _MLX_LM_DRAFT_TOKENS:
        del wanted["num_draft_tokens"]  # mlx-lm's default, which says nothing without a model
    resolved = resolve(RunnerConfig, wanted)
    own = option_names(RunnerConfig)
    values = {own[name]: getattr(resolved, own[name]) for name in wanted}
    if values.get("draft", "off") not in {"off", "auto"}:
        raise OptionError(
            f"draft={values['draft']!r}: what drafts is chosen by load(..., draft=...); a call "
            'can only leave it out with draft="off"'
        )
    if values.get("draft") == "auto":
        del values["draft"]
    return values


def _only(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}

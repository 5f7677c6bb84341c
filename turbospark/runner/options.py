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
        logit_bias: token id to a number added to its logit.
        sampler: replaces the built-in sampling.
        logits_processors: run on each row before sampling.
        prompt_progress_callback: called with (done, total); returning False cancels.
        stop_token_ids: ids that end the text beside the model's own.
        prompt_cache: a session that the prompt continues.
    """

    generation: GenerationConfig
    prefill_chunk: int | None = None
    logit_bias: Mapping[int, float] | None = None
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    prompt_progress_callback: Progress | None = None
    stop_token_ids: Collection[int] | None = None
    prompt_cache: Any = None


_CALL_ONLY = tuple(
    item.name for item in fields(CallOptions) if item.name not in {"generation", "prefill_chunk"}
)


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
    chunk_names = [
        name for name, field in option_names(RunnerConfig).items() if field == "prefill_chunk"
    ]
    known = {*of_generation, *chunk_names, *_CALL_ONLY}
    for name in given:
        if name not in known:
            raise unknown_option(name, known | set(UNBUILT))
    generation = resolve(GenerationConfig, _only(given, of_generation))
    chunk = _only(given, chunk_names)
    wanted = any(value is not None for value in chunk.values())
    return CallOptions(
        generation=generation,
        prefill_chunk=resolve(RunnerConfig, chunk).prefill_chunk if wanted else None,
        **_only(given, _CALL_ONLY),
    )


def _only(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}

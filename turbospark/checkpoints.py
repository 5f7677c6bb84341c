"""What can be said about a checkpoint before it is loaded."""

import dataclasses
import os
from typing import Any, cast

from turbospark.errors import OptionError
from turbospark.loading.inspect import inspect as inspect_checkpoint
from turbospark.loading.inspection import Inspection
from turbospark.loading.plan import check_context
from turbospark.loading.plan import plan as plan_memory
from turbospark.loading.planned import Plan
from turbospark.runner.abilities import abilities
from turbospark.settings import PLANNED_OPTIONS, RunnerConfig, resolve, unknown_option

DEFAULT_MODEL = "demo"


def plan(path_or_repo: str | os.PathLike[str] | None = None, **options: Any) -> Plan:
    """Say what a model needs and whether it fits here; its weights are not downloaded or read.

    Args:
        path_or_repo: as for `load`.
        options: context, sessions; quantize, revision, dequantize, local_files_only, draft and
            checkpoint_bytes as for `load`. A drafter that is given by a Hub id is downloaded.

    Returns:
        the numbers; its `repr` shows the arithmetic and the verdict.

    Raises:
        OptionError: an option is unknown (the nearest is named) or out of range.
        SourceError: no checkpoint is there.
    """
    known = (
        "context", "sessions", "quantize", "revision", "dequantize", "local_files_only",
        *PLANNED_OPTIONS,
    )  # fmt: skip
    for name, value in options.items():
        if name not in known:
            raise unknown_option(name, known)
        if name in {"context", "sessions"}:
            _check_count(name, value)
    wanted: dict[str, Any] = {name: options.pop(name, None) for name in PLANNED_OPTIONS}
    if isinstance(wanted["draft"], os.PathLike):
        wanted["draft"] = os.fspath(cast("os.PathLike[str]", wanted["draft"]))
    return plan_memory(
        DEFAULT_MODEL if path_or_repo is None else path_or_repo,
        config=resolve(RunnerConfig, wanted),
        **options,
    )


def inspect(
    path_or_repo: str | os.PathLike[str] | None = None,
    *,
    context: int | None = None,
    **options: Any,
) -> Inspection:
    """Say what a checkpoint holds and what it can be used for; no weights are read.

    Args:
        path_or_repo: as for `load`; a folder may have a config.json alone. The weights of a Hub id
            stay on the Hub.
        context: tokens of a session, for the bytes of its caches; by default the trained length.
        options: revision and local_files_only, as for `load`.

    Returns:
        what was found; its `repr` shows it.

    Raises:
        OptionError: an option is unknown (the nearest is named) or out of range.
        SourceError: no checkpoint is there.
        ConfigError: its configuration is damaged.
        CheckpointError: its headers are damaged.
    """
    known = ("context", "revision", "local_files_only")
    for name in options:
        if name not in known:
            raise unknown_option(name, known)
    if context is not None:
        _check_count("context", context)
        check_context(context)
    source = DEFAULT_MODEL if path_or_repo is None else path_or_repo
    found = inspect_checkpoint(source, context=context, **options)
    if found.model is None or found.structure is None:
        return found
    caches = found.model.make_caches(found.structure.context, RunnerConfig().ring_slack)
    has_experts = any(group.name == "experts" for group in found.structure.tensors)
    can = abilities(
        found.model,
        caches,
        found.drafter_refusals,
        has_experts=has_experts,
        drafters_beside=found.drafters_beside,
    )
    return dataclasses.replace(found, abilities=can)


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{name}={value!r} is not a whole number above 0")

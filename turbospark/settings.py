"""Options of the process and of the runner: one table, every surface.

A field below is an option. Its name gives the keyword, the environment variable
(`TURBOSPARK_<NAME>`) and the command-line flag (`--<name>`); its metadata gives the help text.
Nothing else in turbospark reads the environment.
"""

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from turbospark.errors import OptionError

Config = TypeVar("Config", "RunnerConfig", "KernelPolicy")


def option(default: Any, help: str) -> Any:
    """Declare an option: a dataclass field that carries its own help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How prompts are fed and sessions kept. One value a loaded model."""

    max_context: int | None = option(
        None, "tokens a session may hold; by default the trained length bounded by memory"
    )
    prefill_chunk: int | None = option(
        None, "prompt tokens of one forward pass; by default 256 on CPUs, 2048 on GPUs"
    )
    ring_slack: int = option(128, "rows a sliding-window cache keeps beyond its window")
    session_slots: int = option(1, "anonymous conversations kept; more than 1 is not built yet")
    prefix_reuse: bool = option(True, "continue from the tokens a prompt shares with the last one")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPolicy:
    """Which kernel bodies run. One value a process, or given to `load`."""

    kernels: Literal["auto", "metal", "cuda", "host", "reference"] = option(
        "auto", "the target whose kernel bodies run"
    )
    activations: Literal["auto", "exact", "pair", "int8"] = option(
        "auto",
        "activations of the host's quantized products: exact is float32, pair is 15 bit, "
        "int8 only when asked; auto is pair where the CPU has VNNI, else exact",
    )
    isa: Literal["auto", "avx512", "avx2", "neon", "generic"] = option(
        "auto", "instruction set of the host kernels; a lower one than the CPU has is allowed"
    )
    threads: int = option(0, "threads of the host kernels; 0 is every core this process may use")
    cxx: str = option("", "C++ compiler of the host kernels; by default c++, clang++ or g++")


def env_name(option_name: str) -> str:
    """The environment variable of an option."""
    return f"TURBOSPARK_{option_name.upper()}"


def resolve(kind: type[Config], given: Mapping[str, Any] | None = None) -> Config:
    """Build `kind` from keyword values, then the environment, then the defaults.

    Args:
        kind: `RunnerConfig` or `KernelPolicy`.
        given: option name to value; None means not given. Text is parsed as on a command line.

    Raises:
        OptionError: a name is unknown (the nearest one is named) or a value does not parse.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        text = os.environ.get(env_name(item.name))
        if text is not None and text != "":
            values[item.name] = _parse(env_name(item.name), text, hints[item.name])
    for name, value in (given or {}).items():
        if name not in hints:
            raise unknown_option(name, hints)
        if value is not None:
            values[name] = _parse(name, value, hints[name])
    return kind(**values)


def unknown_option(name: str, known: Iterable[str]) -> OptionError:
    """An error for an option nobody declared, naming the nearest one that exists."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
    return OptionError(f"unknown option {name!r}{hint}")


def cache_folder() -> Path:
    """Where compiled kernels and joined checkpoints are kept (`TURBOSPARK_CACHE` moves it)."""
    own = os.environ.get("TURBOSPARK_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turbospark"


def compiler_override() -> str:
    """The compiler that the environment names in `CXX`, or an empty string."""
    return os.environ.get("CXX", "")


def _parse(name: str, value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(str, arguments))
            raise OptionError(f"{name}={value!r} is not one of {choices}")
        return value
    if origin in {types.UnionType, typing.Union}:
        hint = next(kind for kind in arguments if kind is not type(None))
    if hint is bool:
        return _parse_bool(name, value)
    if hint is int:
        return _parse_count(name, value)
    return str(value)


def _parse_bool(name: str, value: Any) -> bool:
    word = str(value).lower()
    if word in {"1", "true", "on", "yes"}:
        return True
    if word in {"0", "false", "off", "no"}:
        return False
    raise OptionError(f"{name}={value!r} is neither on nor off")


def _parse_count(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise OptionError(f"{name}={value!r} is not a whole number") from None
    if isinstance(value, bool) or number != float(value) or number < 0:
        raise OptionError(f"{name}={value!r} is not a whole number of 0 or more")
    return number

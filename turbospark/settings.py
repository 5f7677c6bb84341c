"""Options of the process, of loading, of the runner and of one generation: one table.

A field below is an option. Its name gives the keyword and the command-line flag
(`--<name>`), for `RunnerConfig` and `KernelPolicy` the environment variable
(`TURBOSPARK_<NAME>`) too; its metadata gives the help text. Nothing else in turbospark reads
the environment.
"""

import dataclasses
import difflib
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from turbospark.errors import OptionError, SourceError
from turbospark.option_values import parse_value

Config = TypeVar("Config", "RunnerConfig", "KernelPolicy", "LoadConfig", "GenerationConfig")


def option(
    default: Any,
    help: str,
    *,
    env: bool = True,
    alias: str = "",
    low: int | None = 0,
    high: int | None = None,
) -> Any:
    """Declare an option: a dataclass field that carries its own help text.

    Args:
        default: the value when nobody says otherwise.
        help: one line.
        env: whether the environment may set it.
        alias: a second name that is understood too.
        low: the least whole number allowed, for counts.
        high: the greatest.
    """
    metadata = {"help": help, "env": env, "alias": alias, "bounds": (low, high)}
    return field(default=default, metadata=metadata)


def request(default: Any, help: str, *, alias: str = "", low: int | None = 0) -> Any:
    """Declare an option of one call, which the environment never sets."""
    return option(default, help, env=False, alias=alias, low=low)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How prompts are fed and sessions kept. One value a loaded model."""

    max_context: int | None = option(
        None, "tokens a session may hold; by default the trained length bounded by memory", low=1
    )
    prefill_chunk: int | None = option(
        None,
        "prompt tokens of one forward pass; by default 256 on CPUs, 2048 on GPUs",
        alias="prefill_step_size",
        low=1,
    )
    ring_slack: int = option(128, "rows a sliding-window cache keeps beyond its window")
    session_slots: int = option(1, "anonymous conversations kept at a time", low=1)
    session_bytes: int | None = option(
        None,
        "bytes that conversations not in use may keep; by default 2 GiB, or a quarter of the free "
        "memory where that is less",
    )
    prefix_reuse: bool = option(True, "continue from the tokens a prompt shares with earlier ones")
    checkpoint_bytes: int = option(
        256 << 20, "recurrent state that a conversation keeps, to go back to; 0 keeps none"
    )
    checkpoint_every: int = option(512, "tokens between two states that are kept", low=1)
    draft: str = option(
        "auto",
        "what proposes tokens for the model to verify: off, auto, ngram, mtp, or the checkpoint "
        "of a block drafter or of a smaller model; auto is mtp where the model carries it",
    )
    draft_block: int | None = option(
        None,
        "tokens proposed in one round; by default as many as pay off",
        alias="num_draft_tokens",
        low=1,
    )


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
    threads: int = option(
        0, "threads of the host kernels; 0 is every core this process may use", high=1024
    )
    cxx: str = option("", "C++ compiler of the host kernels; by default c++, clang++ or g++")
    disable_kernels: str = option(
        "", "GPU bodies and fused forms to leave out, comma separated; a wrong name lists them all"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Where a checkpoint comes from and what becomes of its weights."""

    quantize: str | None = request(None, "quantize float weights while loading, e.g. int4")
    dequantize: bool = request(False, "unpack weight formats that no kernel reads to float")
    revision: str | None = request(None, "branch, tag or commit of a Hub repository")
    local_files_only: bool = request(False, "never ask the network")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How one generation runs: its budget, its sampling, its stops."""

    max_tokens: int = request(256, "tokens to generate at most; -1 fills the context", low=-1)
    temperature: float = request(
        0.0, "0 takes the likeliest token, whatever the other sampling options say", alias="temp"
    )
    top_p: float | None = request(None, "keep the likeliest tokens that hold this probability")
    top_k: int = request(0, "keep this many of the likeliest tokens, 256 at most; 0 is off")
    min_p: float = request(0.0, "drop tokens less likely than this times the likeliest")
    repetition_penalty: float = request(1.0, "divide the scores of tokens seen before")
    presence_penalty: float = request(0.0, "subtract from the scores of generated tokens")
    frequency_penalty: float = request(0.0, "subtract for every time a token was generated")
    seed: int | None = request(None, "repeat a sampled text; by default the system's entropy")
    stop: tuple[str, ...] = request((), "stop before this text; may be given more than once")
    logprobs: int = request(0, "report the log-probabilities of this many likeliest tokens")


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """An option whose feature is not built yet: only values that ask for nothing are taken.

    Attributes:
        feature: what it would do.
        neutral: values that change nothing, such as mlx-lm's defaults; None always is one.
        instead: what to do now.
        flag: the command-line flag, or an empty string for none.
    """

    feature: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""
    flag: str = ""

    @property
    def reason(self) -> str:
        """Why it cannot be had."""
        return f"{self.feature} is not built yet"


UNBUILT: Mapping[str, Unbuilt] = {
    "kv_bits": Unbuilt("a quantized KV cache", flag="--kv-bits"),
    "kv_group_size": Unbuilt("a quantized KV cache", (64,)),
    "quantized_kv_start": Unbuilt("a quantized KV cache", (0, 5000)),
    "max_kv_size": Unbuilt(
        "a cache that forgets the middle of a text",
        instead="bound the context with load(..., max_context=N)",
    ),
    "residency": Unbuilt(
        "streaming of expert weights", ("auto", "resident"), flag="--expert-residency"
    ),
    "expert_cache_slots": Unbuilt("streaming of expert weights", flag="--expert-cache-slots"),
    "image": Unbuilt("image input", flag="--image"),
    "input_embeddings": Unbuilt("a prompt of embeddings"),
    "device": Unbuilt("a device of its own for each model", ("auto",)),
}


def refuse_unbuilt(given: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the options of features not built yet where they ask for nothing.

    Returns:
        the remaining options.

    Raises:
        OptionError: one of them asks for something.
    """
    rest: dict[str, Any] = {}
    for name, value in given.items():
        entry = UNBUILT.get(name)
        if entry is None:
            rest[name] = value
        elif value is not None and value not in entry.neutral:
            hint = f"; {entry.instead}" if entry.instead else f"; leave {name} out"
            raise OptionError(f"{name}={value!r}: {entry.reason}{hint}")
    return rest


PLAN_CONTEXT, PLAN_SESSIONS = 8192, 2
"""What a plan counts where nobody says: tokens of a session, and sessions."""
PLANNED_OPTIONS = ("draft", "checkpoint_bytes")
"""Of a RunnerConfig, what a plan depends on."""


def let_graphs_grow() -> None:
    """Let MLX put a step's launches into few CUDA graphs, unless the environment says how many.

    MLX ends a graph once the arrays that its launches name reach a size, and counts every array
    whole, at each launch anew. A layer's weights lie in one array, of which each launch reads a
    part: by that count a step of routed experts is a dozen graphs. MLX reads the variable when it
    first computes.
    """
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "100000")


def env_name(option_name: str) -> str:
    """The environment variable of an option."""
    return f"TURBOSPARK_{option_name.upper()}"


def option_names(kind: type[Any]) -> dict[str, str]:
    """Every keyword that `kind` understands, aliases included, to its field's name."""
    names: dict[str, str] = {}
    for item in dataclasses.fields(kind):
        names[item.name] = item.name
        if item.metadata["alias"]:
            names[item.metadata["alias"]] = item.name
    return names


def resolve(kind: type[Config], given: Mapping[str, Any] | None = None) -> Config:
    """Build `kind` from keyword values, then the environment, then the defaults.

    Args:
        kind: one of this module's option tables.
        given: option name to value; None means not given. Text is parsed as on a command line.

    Raises:
        OptionError: a name is unknown (the nearest one is named), given twice, or a value does
            not parse.
    """
    return kind(**{name: value for name, (value, _) in _gather(kind, given or {}).items()})


def origins(kind: type[Config], given: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Where the value of each option of `kind` comes from: its variable, "given" or "default"."""
    found = {name: origin for name, (_, origin) in _gather(kind, given or {}).items()}
    return {item.name: found.get(item.name, "default") for item in dataclasses.fields(kind)}


def unknown_option(name: str, known: Iterable[str]) -> OptionError:
    """An error for an option nobody declared, naming the nearest one that exists."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
    return OptionError(f"unknown option {name!r}{hint}")


def cache_folder() -> Path:
    """Where compiled kernels and joined checkpoints are kept (`TURBOSPARK_CACHE` moves it).

    Raises:
        SourceError: no variable names one, and the user has no home folder.
    """
    own = os.environ.get("TURBOSPARK_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "turbospark"
    try:
        return Path.home() / ".cache" / "turbospark"
    except RuntimeError:
        raise SourceError(
            "this user has no home folder to keep compiled kernels and joined models in; name "
            "one in TURBOSPARK_CACHE"
        ) from None


def compiler_override() -> str:
    """The compiler that the environment names in `CXX`, or an empty string."""
    return os.environ.get("CXX", "")


def mlx_modules_override() -> str:
    """Where the environment says that MLX keeps compiled CUDA modules, or an empty string."""
    return os.environ.get("MLX_PTX_CACHE_DIR", "")


def cuda_toolkit_override() -> str:
    """The CUDA toolkit that the environment names, as MLX looks for it, or an empty string."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""


def _gather(kind: type[Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    values: dict[str, tuple[Any, str]] = {}
    for name, item in fields.items():
        text = os.environ.get(env_name(name), "") if item.metadata["env"] else ""
        if text:
            value = parse_value(env_name(name), text, hints[name], item.metadata["bounds"])
            values[name] = value, env_name(name)
    names = option_names(kind)
    for said, value in given.items():
        if said not in names:
            raise unknown_option(said, names)
        if value is None:
            continue
        name = names[said]
        if values.get(name, (None, ""))[1] == "given":
            raise OptionError(f"{name!r} is given twice, once as {said!r}")
        bounds = fields[name].metadata["bounds"]
        values[name] = parse_value(said, value, hints[name], bounds), "given"
    return values

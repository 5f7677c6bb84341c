"""`turbospark`: the parser, and how errors become exit codes."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from turbospark.cli.flags import (
    add_flags,
    add_unbuilt_flags,
    configuration,
    note_own_flags,
    unbuilt_given,
)
from turbospark.cli.output import (
    Console,
    Notices,
    drop_stdout,
    supply_missing_streams,
    tolerate_any_text,
)
from turbospark.errors import OptionError, TurbosparkError
from turbospark.settings import (
    PLAN_CONTEXT,
    PLAN_SESSIONS,
    PLANNED_OPTIONS,
    GenerationConfig,
    KernelPolicy,
    LoadConfig,
    RunnerConfig,
    option_names,
    refuse_unbuilt,
    unknown_option,
)
from turbospark.version import __version__

OK, FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

_EXAMPLES = {
    "generate": 'turbospark generate "Once upon a time" --max-tokens 64 --temperature 0.7 --seed 1',
    "chat": "turbospark chat --model ./my-model --temperature 0.7",
    "bench": "turbospark bench --prompt-tokens 256 --gen-tokens 64 --json",
    "plan": "turbospark plan ./my-model --context 8192",
    "convert": "turbospark convert ./my-model --output ./my-model-int4 --quantize int4",
    "inspect": "turbospark inspect ./my-model",
    "synthetic": "turbospark synthetic ./tiny --kind moe --set num_hidden_layers=12",
}

# What other programs call an option, where no spelling leads to it.
_ELSEWHERE = {
    "--draft-model": "--draft",
    "--model-draft": "--draft",
    "--max-kv-size": "--max-context",
    "--ctx-size": "--max-context",
    "-c": "--max-context",
    "--n-predict": "--max-tokens",
    "-n": "--max-tokens",
    "--system-prompt": "--system",
    "-t": "--threads",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        the exit code: 0, 1 for an error, 2 for a wrong call, 130 after Ctrl-C.
    """
    supply_missing_streams()
    tolerate_any_text()
    traceback = False
    try:
        arguments = _parsed(argv)
        traceback = arguments.traceback
        return _run(arguments)
    except OptionError as error:
        return _failed(error, USAGE)
    except TurbosparkError as error:
        return _failed(error, FAILED)
    except BrokenPipeError:
        drop_stdout()
        return PIPE_CLOSED
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        return _failed(OSError(f"{place}{error.strerror or error}"), FAILED)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # a fault of ours; it still gets its one line
        if traceback:
            raise
        return _failed(error, FAILED, f"{type(error).__name__} (--traceback shows where): ")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not rest[0].startswith("-"):
        raise OptionError(
            f"unexpected argument {rest[0]!r}: write a text of several words in quotes"
        )
    if rest:
        known = [
            name
            for action in commands[arguments.command]._actions  # type: ignore[reportPrivateUsage]
            for name in action.option_strings
        ]
        name = rest[0].split("=")[0]
        meant = _ELSEWHERE.get(name)
        if meant in known:
            raise OptionError(f"unknown option {name!r}; did you mean {meant!r}?")
        raise unknown_option(name, known)
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    refuse_unbuilt(unbuilt_given(arguments))
    console = Console(arguments.quiet)
    _show_notices(logging.WARNING if arguments.quiet else logging.INFO)
    if arguments.show_config:
        _show_config(arguments, console)
        return OK
    # Commands pull in the whole library; the help texts should not.
    if arguments.command == "generate":
        from turbospark.cli.generate import generate

        generate(arguments, console)
    elif arguments.command == "chat":
        from turbospark.cli.chat import chat

        chat(arguments, console)
    elif arguments.command == "bench":
        from turbospark.cli.bench import bench

        bench(arguments, console)
    else:
        from turbospark.cli import checkpoints

        getattr(checkpoints, arguments.command)(arguments, console)
    return OK


def _show_notices(level: int) -> None:
    """Let the library's one-line notices through to stderr."""
    logger = logging.getLogger("turbospark")
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(Notices())


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="turbospark",
        description="Run language models fast on one machine.",
        epilog="example: " + _EXAMPLES["generate"],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"turbospark {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands: dict[str, _Parser] = {}
    for name, (what, add) in _COMMANDS.items():
        command = subparsers.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog="example: " + _EXAMPLES[name],
            allow_abbrev=False,
        )
        _add_common_flags(command)
        common = [action.dest for action in command._actions]  # type: ignore[reportPrivateUsage]
        add(command)
        note_own_flags(command, common)
        commands[name] = command
    return parser, commands


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--quiet", "-q", action="store_true", help="only results and errors")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print every option with its value and origin, then stop",
    )


def _add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", "-m", metavar="M", help='folder, .gguf file, Hub id or "demo", the default'
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help='the text to continue; "-" reads stdin'
    )
    _add_model_flag(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send the prompt as a message, through the chat template",
    )
    add_flags(parser, GenerationConfig, RunnerConfig, LoadConfig, KernelPolicy)
    add_unbuilt_flags(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_model_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--resume", metavar="FILE", help="go on with a conversation saved by /save")
    add_flags(parser, GenerationConfig, RunnerConfig, LoadConfig, KernelPolicy)
    add_unbuilt_flags(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model_flag(parser)
    for name, default, what in (
        ("prompt-tokens", "256", "prompt sizes"),
        ("gen-tokens", "64", "numbers of generated tokens"),
    ):
        parser.add_argument(
            f"--{name}", metavar="N,N", default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--repetitions", "-r", metavar="N", type=int, default=3, help="runs of each (default: 3)"
    )
    add_flags(parser, RunnerConfig, LoadConfig, KernelPolicy)
    add_unbuilt_flags(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model elsewhere")
    for name, default, what in (
        ("context", PLAN_CONTEXT, "tokens a session"),
        ("sessions", PLAN_SESSIONS, "sessions kept"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{what} (default: {default})",
        )
    left_out = {*option_names(RunnerConfig).values()} - {*PLANNED_OPTIONS}
    add_flags(parser, LoadConfig, RunnerConfig, left_out=left_out)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file or Hub id")
    parser.add_argument(
        "--output", "-o", metavar="FOLDER", required=True, help="a folder that does not exist yet"
    )
    add_flags(parser, LoadConfig)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model elsewhere")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens a session (default: the trained length)"
    )
    add_flags(parser, LoadConfig, unused=("quantize", "dequantize"))


def _add_synthetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output", metavar="FOLDER", help="a folder that is empty or does not exist yet"
    )
    parser.add_argument("--kind", metavar="K", help="dense (the default), sliding, moe or streamed")
    parser.add_argument("--model-type", metavar="T", help="in place of a kind, another family's")
    parser.add_argument(
        "--quantize", default="int4", metavar="Q", help="int4 (the default), int8-g32, ... or none"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value of config.json, as JSON or text; may be given more than once",
    )
    parser.set_defaults(tables=(), unused=frozenset())


_COMMANDS = {
    "generate": ("continue a text", _add_generate),
    "chat": ("talk to a model", _add_chat),
    "bench": ("measure prefill and decode", _add_bench),
    "plan": ("say what a model needs and whether it fits", _add_plan),
    "convert": ("write a quantized checkpoint", _add_convert),
    "inspect": ("show what a checkpoint holds and what it can be used for", _add_inspect),
    "synthetic": ("write a small checkpoint of random weights", _add_synthetic),
}


def _show_config(arguments: argparse.Namespace, console: Console) -> None:
    found = configuration(arguments)
    if found.get("session_bytes", (0, ""))[0] is None:
        from turbospark.loading.plan import free_bytes
        from turbospark.sessions.budget import default_limit

        found["session_bytes"] = default_limit(free_bytes()), "default"
    if arguments.json:
        console.show(json.dumps({n: {"value": v, "origin": o} for n, (v, o) in found.items()}))
        return
    width = max((len(name) for name in found), default=0)
    for name, (value, origin) in found.items():
        console.show(f"{name:{width}}  {value!r}  ({origin})")


def _failed(error: Exception, code: int, kind: str = "") -> int:
    print(f"turbospark: error: {kind}{' '.join(str(error).split())}", file=sys.stderr)
    return code

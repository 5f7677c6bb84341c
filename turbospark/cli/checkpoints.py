"""`turbospark plan`, `convert` and `inspect`: what can be said about a checkpoint's files."""

import argparse
import json
from typing import Any

from turbospark.checkpoints import inspect as inspect_checkpoint
from turbospark.checkpoints import plan as plan_memory
from turbospark.cli.flags import given
from turbospark.cli.output import Console
from turbospark.errors import OptionError
from turbospark.loading.convert import convert as convert_checkpoint
from turbospark.settings import LoadConfig, RunnerConfig
from turbospark.testing.synthetic import synthetic as write_synthetic

_ARGUMENTS = {
    "folder": "FOLDER",
    "kind": "--kind",
    "model_type": "--model-type",
    "quantize": "--quantize",
    "seed": "--seed",
}


def plan(arguments: argparse.Namespace, console: Console) -> None:
    """Say what a model needs and whether it fits."""
    wanted = _options(arguments) | given(arguments, RunnerConfig)
    found = plan_memory(
        arguments.model, context=arguments.context, sessions=arguments.sessions, **wanted
    )
    _show(found, arguments, console)


def convert(arguments: argparse.Namespace, console: Console) -> None:
    """Write a checkpoint with quantized weights."""
    wanted = _options(arguments)
    done = convert_checkpoint(
        arguments.model, arguments.output, progress=console.bar("converting"), **wanted
    )
    _show(done, arguments, console)


def inspect(arguments: argparse.Namespace, console: Console) -> None:
    """Show what a checkpoint holds and what it can be used for."""
    wanted = _options(arguments)
    found = inspect_checkpoint(arguments.model, context=arguments.context, **wanted)
    _show(found, arguments, console)


def synthetic(arguments: argparse.Namespace, console: Console) -> None:
    """Write a small checkpoint."""
    folder = write_synthetic(
        arguments.output,
        arguments.kind,
        model_type=arguments.model_type,
        quantize=None if arguments.quantize == "none" else arguments.quantize,
        seed=arguments.seed,
        **dict(map(_setting, arguments.set)),
    )
    _show(inspect_checkpoint(folder), arguments, console)


def _setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise OptionError(f"--set {text!r} is not NAME=VALUE")
    if name in _ARGUMENTS:
        raise OptionError(f"--set {text!r} is no value of config.json: give {_ARGUMENTS[name]}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    wanted = given(arguments, LoadConfig)
    for name in wanted:
        if name in arguments.unused:
            raise OptionError(f"{name}: `{arguments.command}` does not use it; leave it out")
    return wanted


def _show(found: Any, arguments: argparse.Namespace, console: Console) -> None:
    console.show(json.dumps(found.as_dict(), default=str) if arguments.json else repr(found))

"""The engine that a command line asks for."""

import argparse
from typing import Any

from turbospark.api import Engine, load
from turbospark.cli.flags import given
from turbospark.cli.output import Console
from turbospark.settings import GenerationConfig, KernelPolicy, LoadConfig, RunnerConfig


def open_engine(arguments: argparse.Namespace, console: Console) -> Engine:
    """Load the model that the flags name, with a bar while it takes."""
    options = given(arguments, RunnerConfig, LoadConfig, KernelPolicy)
    return load(arguments.model, progress=console.bar("loading"), **options)


def call_options(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Keywords of a generation, with a bar over the prompt."""
    options = given(arguments, GenerationConfig)
    bar = console.bar("reading the prompt")
    return options if bar is None else {**options, "prompt_progress_callback": bar}

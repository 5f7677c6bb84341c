"""`turbospark generate`."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from turbospark.api import Engine
from turbospark.cli.engine import call_options, open_engine
from turbospark.cli.output import Console
from turbospark.errors import PromptError
from turbospark.runner.options import read_options
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.sampling.config import check_sampling

DEFAULT_PROMPT = "The history of the steam engine begins in the first century, when"


def generate(arguments: argparse.Namespace, console: Console) -> None:
    """Continue a text: streamed to stdout, or one JSON object at the end."""
    options = call_options(arguments, console)
    check_sampling(read_options(options).generation)  # before a long load
    prompt = _prompt(arguments, console)
    engine = open_engine(arguments, console)
    if arguments.json:
        console.show(json.dumps(result_fields(engine, engine.generate(prompt, **options))))
        return
    last = stream(engine.stream(prompt, **options), console)
    if last is not None:
        console.note(last.summary())


def stream(responses: Any, console: Console) -> GenerationResponse | None:
    """Show responses as they come; give back the last one."""
    last: GenerationResponse | None = None
    for response in responses:
        console.show(response.text, end="")
        last = response
    console.show("")
    return last


def result_fields(engine: Engine, text: GeneratedText) -> dict[str, Any]:
    """What `--json` prints of a generation."""
    last = text.response
    return {
        "text": text.text,
        "token_ids": last.token_ids,
        "prompt_tokens": last.prompt_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "ttft": last.ttft,
        "reused_tokens": last.reused_tokens,
        "reuse_reason": last.reuse_reason,
        "evicted": last.evicted,
        "peak_memory": last.peak_memory,
        "finish_reason": last.finish_reason,
        **draft_fields(last),
        "kernels": engine.kernels.describe(),
    }


def draft_fields(last: GenerationResponse) -> dict[str, Any]:
    """What `--json` prints of drafting."""
    names = (
        "drafted", "accepted", "accepted_per_position", "rounds", "rollbacks", "draft_off_reason",
    )  # fmt: skip
    return {name: getattr(last, name) for name in names}


def _prompt(arguments: argparse.Namespace, console: Console) -> str | list[Mapping[str, str]]:
    text = arguments.prompt
    if text is None:
        text = DEFAULT_PROMPT
        console.note(f"no prompt given; continuing: {text}")
    elif text == "-":
        text = sys.stdin.read()
    if not text:
        raise PromptError("the prompt is empty: give at least one character")
    return [{"role": "user", "content": text}] if arguments.chat else text

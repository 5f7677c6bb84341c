"""`turbospark chat`: one conversation on the terminal."""

import argparse
import importlib
import json
import sys

from turbospark.api import Engine
from turbospark.cli.engine import call_options, open_engine
from turbospark.cli.generate import result_fields, stream
from turbospark.cli.output import Console
from turbospark.errors import OptionError, PromptError, TemplateError, TurbosparkError
from turbospark.runner.conversation import Conversation
from turbospark.sessions.file import check_file

_HELP = "/reset starts over, /save FILE keeps it, /exit or Ctrl-D ends; Ctrl-C stops a reply"


def chat(arguments: argparse.Namespace, console: Console) -> None:
    """Read messages, show replies, until /exit or the end of input."""
    options = call_options(arguments, console)
    if arguments.resume is not None and arguments.system is not None:
        raise OptionError("--system begins a conversation and --resume goes on with one; give one")
    if arguments.resume is not None:
        check_file(arguments.resume)  # before the model is loaded
    engine = open_engine(arguments, console)
    conversation = _opened(engine, arguments)
    console.note(_HELP)
    while (line := _read_line()) is not None:
        command = line.strip()
        if command in {"/exit", "/quit"}:
            return
        if command == "/reset":
            conversation.reset()
            _begin(conversation, arguments.system, True)
            console.note("the conversation starts over")
        elif command.split()[:1] == ["/save"]:
            _save(conversation, command.removeprefix("/save").strip(), console)
        elif command.startswith("/"):
            console.note(f"{command.split()[0]} is no command: {_HELP}")
        elif command:
            try:
                if arguments.json:
                    text = conversation.send(line, **options)
                    console.show(json.dumps(result_fields(engine, text)))
                    continue
                last = stream(conversation.stream(line, **options), console)
                if last is not None:
                    console.note(last.summary())
            except KeyboardInterrupt:
                console.note("\n(stopped)")
            except (PromptError, TemplateError) as error:
                console.note(f"turbospark: error: {error}")


def _opened(engine: Engine, arguments: argparse.Namespace) -> Conversation:
    if arguments.resume is None:
        conversation = engine.session("chat")
        _begin(conversation, arguments.system, engine.tokenizer.chat_template is not None)
        return conversation
    return engine.load_session(arguments.resume, "chat")


def _save(conversation: Conversation, path: str, console: Console) -> None:
    if not path:
        console.note("/save needs the name of a file: /save FILE")
        return
    try:
        conversation.save(path)
    except TurbosparkError as error:
        console.note(f"turbospark: error: {error}")
    else:
        console.note(f"saved as {path}; `turbospark chat --resume {path}` goes on with it")


def _begin(conversation: Conversation, system: str | None, has_template: bool) -> None:
    if system is None:
        return
    if not has_template:
        raise OptionError("--system: this model has no chat template; leave it out")
    conversation.messages.append({"role": "system", "content": system})


def _read_line() -> str | None:
    if sys.stdin.isatty():
        importlib.import_module("readline")  # gives `input` line editing
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None

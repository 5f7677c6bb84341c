"""Flags made from the option tables: one declaration, every surface."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

from turbospark.settings import (
    UNBUILT,
    GenerationConfig,
    KernelPolicy,
    LoadConfig,
    RunnerConfig,
    origins,
    resolve,
)

Table = type[GenerationConfig] | type[RunnerConfig] | type[KernelPolicy] | type[LoadConfig]

TITLES: Mapping[Table, str] = {
    GenerationConfig: "generation",
    RunnerConfig: "context",
    LoadConfig: "loading",
    KernelPolicy: "kernels",
}


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser,
    *tables: Table,
    unused: Collection[str] = (),
    left_out: Collection[str] = (),
) -> None:
    """Give a parser a flag for every option of the tables, and remember the tables.

    Args:
        parser: of one command.
        tables: of options.
        unused: options that the command refuses; the help leaves them out.
        left_out: options that it does not have at all.
    """
    for table in tables:
        group = parser.add_argument_group(TITLES[table])
        hints = typing.get_type_hints(table)
        for item in dataclasses.fields(table):
            if item.name in left_out:
                continue
            names = [flag(item.name)]
            if item.metadata["alias"]:
                names.append(flag(item.metadata["alias"]))
            text = argparse.SUPPRESS if item.name in unused else _help(item)
            group.add_argument(
                *names, dest=item.name, default=None, help=text, **_kind(hints[item.name])
            )
    parser.set_defaults(tables=tables, unused=frozenset({*unused, *left_out}))


def note_own_flags(parser: argparse.ArgumentParser, common: Collection[str]) -> None:
    """Remember a command's flags that no table declares.

    Args:
        parser: of one command, complete.
        common: what every command has.
    """
    tables: tuple[Table, ...] = parser.get_default("tables")
    known = {item.name for table in tables for item in dataclasses.fields(table)} | set(common)
    own = {
        action.dest: (action.option_strings[0], action.default)
        for action in parser._actions  # type: ignore[reportPrivateUsage]
        if action.option_strings and action.dest not in known and action.help != argparse.SUPPRESS
    }
    parser.set_defaults(own=own)


def add_unbuilt_flags(parser: argparse.ArgumentParser) -> None:
    """Accept the flags of features that are not built yet, so that they are refused by name."""
    for name, entry in UNBUILT.items():
        if entry.flag:
            parser.add_argument(entry.flag, dest=name, default=None, help=argparse.SUPPRESS)


def given(arguments: argparse.Namespace, *tables: Table) -> dict[str, Any]:
    """The options of these tables that the command line gives."""
    names = [item.name for table in tables for item in dataclasses.fields(table)]
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def unbuilt_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of features not built yet that the command line gives."""
    values = {name: getattr(arguments, name, None) for name in UNBUILT}
    return {name: value for name, value in values.items() if value is not None}


def configuration(arguments: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Every option of a command with its value and where that comes from."""
    own: dict[str, tuple[str, Any]] = arguments.own
    found: dict[str, tuple[Any, str]] = {}
    for name, (option, default) in own.items():
        value = getattr(arguments, name)
        found[name] = value, "default" if value == default else option
    tables: tuple[type[Any], ...] = arguments.tables
    for table in tables:
        wanted = given(arguments, table)
        values = resolve(table, wanted)
        for name, origin in origins(table, wanted).items():
            said = flag(name) if origin == "given" else origin
            if name not in arguments.unused:
                found[name] = getattr(values, name), said
    return found


def _kind(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"choices": arguments}
    if origin in {types.UnionType, typing.Union}:
        hint = next(kind for kind in arguments if kind is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is tuple:
        return {"action": "append", "metavar": "TEXT"}
    return {"metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def _help(item: "dataclasses.Field[Any]") -> str:
    text = str(item.metadata["help"]).replace("%", "%%")
    shown = item.default not in (None, "", (), False)
    return f"{text} (default: {item.default})" if shown else text

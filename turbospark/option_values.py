"""What the value of an option may be, and what its text stands for."""

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from turbospark.errors import OptionError

Bounds = tuple[int | None, int | None]


def parse_value(name: str, value: Any, hint: Any, bounds: Bounds) -> Any:
    """A value as an option has it.

    Args:
        name: what the user calls the option, for the message.
        value: as given, text where it comes from the environment or the command line.
        hint: the option's type.
        bounds: least and greatest of a whole number, where there are any.

    Raises:
        OptionError: the value is not of the type, or outside the bounds.
    """
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
        return _parse_count(name, value, *bounds)
    if hint is float:
        return _parse_float(name, value)
    if origin is tuple:
        return _parse_texts(name, value)
    if not isinstance(value, str):
        raise OptionError(f"{name}={value!r} is not text")
    return value


def _parse_bool(name: str, value: Any) -> bool:
    word = str(value).lower()
    if word in {"1", "true", "on", "yes"}:
        return True
    if word in {"0", "false", "off", "no"}:
        return False
    raise OptionError(f"{name}={value!r} is neither on nor off")


def _parse_count(name: str, value: Any, low: int | None, high: int | None) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"{name}={value!r} is not a whole number") from None
    fraction = not isinstance(value, str) and number != value
    if isinstance(value, bool) or fraction or (low is not None and number < low):
        bound = "" if low is None else f" of {low} or more"
        raise OptionError(f"{name}={value!r} is not a whole number{bound}")
    if high is not None and number > high:
        raise OptionError(f"{name}={value!r} is more than {high}")
    return number


def _parse_float(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise OptionError(f"{name}={value!r} is not a number") from None


def _parse_texts(name: str, value: Any) -> tuple[str, ...]:
    texts: Sequence[Any] = (value,) if isinstance(value, str) else value
    try:
        found = tuple(texts)
    except TypeError:
        raise OptionError(f"{name}={value!r} is neither text nor a list of texts") from None
    for text in found:
        if not isinstance(text, str) or not text:
            raise OptionError(f"{name}: {text!r} is no text to stop at; give a non-empty string")
    return found

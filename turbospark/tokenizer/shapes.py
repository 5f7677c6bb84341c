"""Type guards for values that come from JSON files and from callers."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a JSON value is an object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value is a list."""
    return isinstance(value, list)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value maps names to values."""
    return isinstance(value, Mapping)


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can write a text: JSON may hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list of things rather than text or one thing."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)

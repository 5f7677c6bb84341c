"""Arrays of several owners in one mapping, as a file holds them: under "part.name"."""

from collections.abc import Mapping

import mlx.core as mx

Parts = dict[str, dict[str, mx.array]]


def export_parts(parts: Mapping[str, Mapping[str, mx.array]]) -> dict[str, mx.array]:
    """The arrays of several parts under "part.name"."""
    return {
        f"{part}.{name}": array for part, arrays in parts.items() for name, array in arrays.items()
    }


def split_parts(arrays: Mapping[str, mx.array]) -> Parts:
    """The inverse of `export_parts`: by the first part of a name; the rest of it may have parts."""
    parts: Parts = {}
    for name, array in arrays.items():
        part, _, leaf = name.partition(".")
        parts.setdefault(part, {})[leaf] = array
    return parts

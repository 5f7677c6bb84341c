"""config.json's model_type to a Family, through entry points.

The entry-point NAME is the model_type, so resolving one imports exactly one family module.
`turbospark.gguf` is the same for GGUF files, by `general.architecture`.
"""

import difflib
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from turbospark.errors import UnsupportedError
from turbospark.protocols import Family

GROUP = "turbospark.families"
GGUF_GROUP = "turbospark.gguf"


def known_types(group: str = GROUP) -> list[str]:
    """Every registered model_type (or GGUF architecture), sorted, without importing any."""
    return sorted({point.name for point in entry_points(group=group)})


def resolve_family(model_type: str, group: str = GROUP) -> Family:
    """Import and return the family registered under `model_type`.

    Raises:
        UnsupportedError: no family or more than one distribution registers it.
        ImportError: the family's own module fails to import; passed on as it is.
    """
    points = _distinct(entry_points(group=group, name=model_type))
    if len(points) == 1:
        return points[0].load()
    if points:
        owners = ", ".join(point.value for point in points)
        raise UnsupportedError(
            f"model type {model_type!r} is registered {len(points)} times ({owners}): "
            "uninstall all but one of these packages"
        )
    known = known_types(group)
    near = difflib.get_close_matches(model_type, known, n=1)
    hint = f"the nearest is {near[0]!r}" if near else "it has no near neighbour"
    raise UnsupportedError(
        f"model type {model_type!r} is not implemented; {hint}. Known: {', '.join(known)}. "
        f"A package of your own can add it through the entry-point group {group!r}"
    )


def _distinct(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    # An editable install beside a wheel lists the same entry point twice.
    unique: dict[str, EntryPoint] = {}
    for point in points:
        unique.setdefault(point.value, point)
    return list(unique.values())

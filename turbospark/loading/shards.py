"""Writing weights as safetensors: one file, or shards with an index."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from turbospark.loading.checkpoint import INDEX, SINGLE


def split_names(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Group names, in order, so that a group stays within `limit` bytes where it can."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def save_safetensors(path: Path, tensors: dict[str, mx.array]) -> None:
    """Write one file as MLX does."""
    save: Callable[..., None] = cast("Any", mx).save_safetensors
    save(str(path), tensors, metadata={"format": "mlx"})


def write_shards(
    folder: Path,
    groups: Sequence[Iterable[str]],
    arrays_of: Callable[[str], Iterable[tuple[str, mx.array]]],
    save: Callable[[Path, dict[str, mx.array]], None] = save_safetensors,
) -> int:
    """Write groups of weights, one shard in memory at a time; return the bytes of all tensors.

    Args:
        folder: where to write.
        groups: weight names by shard.
        arrays_of: a weight's tensors by the names they are stored under.
        save: writes one file.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, start=1):
        file = SINGLE
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = dict(pair for name in names for pair in arrays_of(name))
        save(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(array.nbytes for array in tensors.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total

"""What a cache of rows takes back from a file: nothing but the rows of one alike."""

from collections.abc import Mapping
from typing import Protocol, cast

import mlx.core as mx

from turbospark.errors import CheckpointError
from turbospark.kernels.device import on_cpu


class Rows(Protocol):
    """What decides whether exported rows fit."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    max_context: int
    reach: int


def check_exported(cache: Rows, arrays: Mapping[str, mx.array]) -> tuple[int, int]:
    """Hold exported arrays against the cache that is to take them.

    Returns:
        the first position kept, and the offset.

    Raises:
        CheckpointError: they are none of a cache like this one.
    """
    first, offset = _span(cache, arrays)
    _check_rows(cache, arrays, offset - first)
    return first, offset


def _span(cache: Rows, arrays: Mapping[str, mx.array]) -> tuple[int, int]:
    span = arrays.get("span")
    if span is None or span.shape != (3,) or span.dtype != mx.int64:
        raise CheckpointError(f"{cache!r} is given arrays {sorted(arrays)} of another cache")
    first, offset, window = cast("list[int]", span.tolist())  # host memory: three numbers
    if window != cache.reach:
        kept = [f"a window of {size}" if size else "no window" for size in (window, cache.reach)]
        raise CheckpointError(f"{cache!r} has {kept[1]}, the rows given have {kept[0]}")
    if not 0 <= first <= offset or (first and not 0 < window <= offset - first):
        raise CheckpointError(f"rows {first} to {offset} are none that {cache!r} can continue")
    if offset > cache.max_context:
        raise CheckpointError(
            f"{cache!r} cannot take {offset} tokens; load with max_context={offset} or more"
        )
    return first, offset


def _check_rows(cache: Rows, arrays: Mapping[str, mx.array], count: int) -> None:
    names = {"span", "k", "v"} if count else {"span"}
    if set(arrays) != names:
        raise CheckpointError(f"{cache!r} takes {sorted(names)}, not {sorted(arrays)}")
    if not count:
        return
    k, v = arrays["k"], arrays["v"]
    shapes = [(cache.num_kv_heads, count, dims) for dims in (cache.head_dim, cache.value_dim)]
    if [k.shape, v.shape] != shapes:
        wanted = " and ".join(dict.fromkeys(map(str, shapes)))
        raise CheckpointError(f"{cache!r} takes rows {wanted}, not {k.shape} and {v.shape}")
    dtypes = (mx.float32,) if on_cpu() else (mx.float32, mx.float16, mx.bfloat16)
    if k.dtype != v.dtype or k.dtype not in dtypes:
        raise CheckpointError(
            f"{cache!r} holds rows of {' or '.join(map(str, dtypes))} here, not {k.dtype}"
        )

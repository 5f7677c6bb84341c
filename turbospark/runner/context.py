"""How long a session may get where nobody says."""

from collections.abc import Sequence
from typing import Any

from turbospark.caches.kv import KVCache

UNDECIDED = 4096
_STEP = 256


def choose_max_context(
    wish: int | None, trained: int | None, row_bytes: int, free_bytes: int | None
) -> int:
    """Tokens a session may hold.

    Args:
        wish: what was asked for; it wins.
        trained: the length the model was trained for, if it says so.
        row_bytes: bytes that one token adds to the caches, or 0 where they do not grow.
        free_bytes: memory that may be had now, or None where the machine does not say.

    Returns:
        the trained length, bounded so that the caches fit half of the free memory; 4096 where
        neither decides.
    """
    if wish is not None:
        return wish
    bound = None
    if row_bytes and free_bytes is not None:
        bound = max(free_bytes // 2 // row_bytes // _STEP * _STEP, _STEP)
    if trained is None:
        return UNDECIDED if bound is None else min(UNDECIDED, bound)
    return trained if bound is None else min(trained, bound)


def row_bytes(caches: Sequence[Any]) -> int:
    """Bytes a token adds to the caches that grow with the text, in float32."""
    growing = (cache for cache in caches if isinstance(cache, KVCache))
    return sum(4 * cache.num_kv_heads * (cache.head_dim + cache.value_dim) for cache in growing)

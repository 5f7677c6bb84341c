"""What drafters keep of a target's passes, and how their memory becomes arrays of a file."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx

from turbospark.errors import CheckpointError, NonFiniteError
from turbospark.protocols import LayerCache

RETAINED = 64
"""Rows that are captured at most before those that can be written are."""


class CapturedRows:
    """Consecutive rows [n, C] at absolute positions, in the blocks that they came in."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self._blocks: list[mx.array] = []

    def __len__(self) -> int:
        return sum(block.shape[0] for block in self._blocks)

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.start + len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(block.nbytes for block in self._blocks)

    def append(self, block: mx.array) -> None:
        """Add rows at `end`."""
        self._blocks.append(block)

    def cut(self, end: int) -> None:
        """Drop the rows from position `end` on; where that is before `start`, all of them."""
        while self._blocks and self.end > end:
            block = self._blocks.pop()
            kept = max(0, end - self.end)
            if kept:
                self._blocks.append(block[:kept])
                break
        self.start = min(self.start, end)

    def drop(self, start: int) -> None:
        """Drop the rows before position `start`."""
        while self._blocks and self.start < start:
            block = self._blocks.pop(0)
            count = min(block.shape[0], start - self.start)
            self.start += count
            if count < block.shape[0]:
                # A gather, since a slice would hold the whole block.
                self._blocks.insert(0, mx.take(block, mx.arange(count, block.shape[0]), axis=0))

    def between(self, start: int, end: int) -> mx.array:
        """Rows [end - start, C] of positions start .. end - 1, which are all there."""
        rows = mx.concatenate(self._blocks) if len(self._blocks) > 1 else self._blocks[0]
        return rows[start - self.start : end - self.start]

    def copy(self) -> "CapturedRows":
        """Independent rows of the same values."""
        twin = CapturedRows(self.start)
        twin._blocks = list(self._blocks)
        return twin

    def arrays(self) -> list[mx.array]:
        """The blocks, to be evaluated."""
        return list(self._blocks)

    def export(self) -> dict[str, mx.array]:
        """`span` [2], the first position and the one behind the last; `rows` [n, C] if any."""
        exported = {"span": mx.array([self.start, self.end], mx.int64)}
        return exported | ({"rows": self.between(self.start, self.end)} if len(self) else {})

    @staticmethod
    def restored(arrays: Mapping[str, mx.array], width: int) -> "CapturedRows":
        """Rows as `export` gave them.

        Raises:
            CheckpointError: they are none, or of another width.
        """
        span = arrays.get("span")
        if span is None or span.shape != (2,) or span.dtype != mx.int64:
            raise CheckpointError(f"captured rows are span and rows, not {sorted(arrays)}")
        start, end = cast("list[int]", span.tolist())
        if not 0 <= start <= end or set(arrays) != {"span", *(["rows"] if end > start else [])}:
            raise CheckpointError(f"captured rows {start} to {end} in {sorted(arrays)}")
        captured = CapturedRows(start)
        if end > start:
            rows, floats = arrays["rows"], (mx.float32, mx.float16, mx.bfloat16)
            if rows.shape != (end - start, width) or rows.dtype not in floats:
                raise CheckpointError(
                    f"captured rows are {rows.shape} {rows.dtype} where {(end - start, width)} "
                    "floats are needed"
                )
            captured.append(rows)
        return captured


def check_finite(rows: mx.array, position: int, what: str, *others: mx.array) -> None:
    """Evaluate rows [n, C] and refuse NaN and infinity; other arrays are evaluated along.

    Raises:
        NonFiniteError: naming the first bad row.
    """
    bad = ~mx.isfinite(rows).all(axis=-1)
    evaluate(bad, *others)
    if bad.any().item():
        first = position + cast("int", mx.argmax(bad).item())
        raise NonFiniteError(
            f"{what} at position {first} holds NaN or infinity, so nothing can be drafted from it"
        )


def evaluate(*arrays: mx.array) -> None:
    """Compute arrays now."""
    mx.eval(*arrays)  # pyright: ignore[reportUnknownMemberType]


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """The newest rows that row caches hold, to be evaluated."""
    blocks = [cache.rows().tail for cache in caches]
    return [array for block in blocks if block is not None for array in (block.k, block.v)]


def restore_caches(caches: Sequence[LayerCache], parts: dict[str, dict[str, mx.array]]) -> int:
    """Restore caches just made from the parts "cache0", "cache1", ..., which are taken out.

    Returns:
        The position at which all of them stand.

    Raises:
        CheckpointError: one does not fit, or stands elsewhere than the first.
    """
    for index, cache in enumerate(caches):
        cache.restore(parts.pop(f"cache{index}", {}))
        if cache.offset != caches[0].offset:
            raise CheckpointError(
                f"cache {index} of a drafter stands at {cache.offset}, the first one at "
                f"{caches[0].offset}"
            )
    return caches[0].offset


def export_caches(caches: Sequence[LayerCache]) -> dict[str, dict[str, mx.array]]:
    """The arrays of caches as parts."""
    return {f"cache{index}": cache.export() for index, cache in enumerate(caches)}


def ids_array(ids: Sequence[int]) -> dict[str, mx.array]:
    """Token ids as a part."""
    return {"ids": mx.array(list(ids), mx.int32)}


def ids_of(arrays: Mapping[str, mx.array], name: str) -> list[int]:
    """Token ids of a part.

    Raises:
        CheckpointError: they are none.
    """
    ids = arrays.get("ids")
    if ids is None or ids.ndim != 1 or ids.dtype != mx.int32 or len(arrays) != 1:
        raise CheckpointError(f"{name} of a drafter's state must be one row of int32 ids")
    return cast("list[int]", ids.tolist())

"""What a prediction head remembers of one conversation."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from turbospark.caches.kv import KVCache
from turbospark.caches.parts import export_parts, split_parts
from turbospark.errors import CheckpointError, RewindError
from turbospark.speculation.captures import (
    CapturedRows,
    export_caches,
    ids_array,
    ids_of,
    restore_caches,
)


@dataclass(frozen=True, slots=True, eq=False)
class MTPMark:
    """What a return to `position` needs beside the written rows: the hidden row before it."""

    position: int
    hidden: mx.array | None

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return 0 if self.hidden is None else self.hidden.nbytes


class MTPState:
    """Rows of the head over one conversation.

    Args:
        make_caches: gives empty rows.
        width: of a hidden row.

    Attributes:
        caches: rows of the head, chained ones included.
        ids: the tokens whose hidden rows were given.
        hidden: the newest of these rows, all that are not written among them.
        chain: tokens of the draft steps since; the first stands behind `ids`.
        output: the head's final norm [1, C] of the last step.
    """

    def __init__(self, make_caches: Callable[[], list[KVCache]], width: int) -> None:
        self._make_caches, self._width = make_caches, width
        self.caches = make_caches()
        self.ids = array("i")
        self.hidden = CapturedRows()
        self.chain: list[int] = []
        self.output: mx.array | None = None

    @property
    def covered(self) -> int:
        """Positions whose hidden rows were given."""
        return len(self.ids)

    @property
    def written(self) -> int:
        """Rows in the caches."""
        return self.caches[0].offset

    @property
    def cursor(self) -> int:
        """The position of the next row; those that only wait to be written count as written."""
        return max(0, len(self.ids) + len(self.chain) - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, written and captured."""
        return sum(cache.nbytes for cache in self.caches) + self.hidden.nbytes

    def fork(self) -> "MTPState":
        """An independent state; written rows are shared until one side writes."""
        twin = MTPState(self._make_caches, self._width)
        twin.caches = [cache.fork() for cache in self.caches]
        twin.ids, twin.hidden = array("i", self.ids), self.hidden.copy()
        twin.chain, twin.output = [*self.chain], self.output
        return twin

    def mark(self) -> MTPMark:
        """The newest hidden row."""
        end = self.covered
        if not len(self.hidden):
            return MTPMark(end, None)
        row = self.hidden.between(end - 1, end)
        row = mx.take(row, mx.arange(1), axis=0)  # a slice would hold the whole pass
        mx.async_eval(row)  # pyright: ignore[reportUnknownMemberType]
        return MTPMark(end, row)

    def resume_at(self, keep: int, mark: MTPMark | None = None) -> int:
        """The last position <= keep from which it can follow.

        At a position whose last hidden row is gone it can only stand where the token behind it
        is one that was kept, so it asks for that token to be fed once more.
        """
        keep = min(keep, self.covered)
        if keep > self.hidden.start or _fits(mark, keep):
            return keep
        return max(0, keep - 1)

    def rewind(self, position: int, mark: MTPMark | None = None) -> None:
        """Stand at `position`.

        A row that was written stays even where its token is not among `ids` any more; `observe`
        writes it anew if another token follows.

        Raises:
            RewindError: the state has not come that far; nothing has moved.
        """
        if position > self.covered:
            raise RewindError(
                f"the prediction head follows {self.covered} tokens and cannot go to {position}"
            )
        following = [*self.ids[position : position + 1], *self.chain][:1]
        kept = min(self.written, position)
        for cache in self.caches:
            cache.rewind(cache.offset - kept)
        self.chain = following if kept == position and position else []
        self.output = None
        del self.ids[position:]
        self.hidden.cut(position)
        if _fits(mark, position) and not len(self.hidden) and mark and mark.hidden is not None:
            self.hidden = CapturedRows(position - 1)
            self.hidden.append(mark.hidden)

    def export(self) -> dict[str, mx.array]:
        """Rows that the target's own hidden rows gave, captured ones, and the tokens."""
        own = self.fork()
        own.drop_chain()
        text = {"text": ids_array(own.ids), "chain": ids_array(own.chain)}
        hidden = {"hidden": own.hidden.export()}
        return export_parts(export_caches(own.caches) | hidden | text)

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave.

        Raises:
            CheckpointError: it is of another head, or damaged; nothing has changed.
        """
        parts = split_parts(arrays)
        ids = ids_of(parts.pop("text", {}), "the text")
        chain = ids_of(parts.pop("chain", {}), "the token behind the text")
        hidden = CapturedRows.restored(parts.pop("hidden", {}), self._width)
        caches = self._make_caches()
        written = restore_caches(caches, parts)
        if (
            parts
            or not hidden.start <= written <= len(ids) == hidden.end
            or len(chain) != (written == len(ids) > 0)
        ):
            raise CheckpointError(
                f"the prediction head's arrays contradict one another: {written} rows of "
                f"{len(ids)} tokens, hidden rows {hidden.start} to {hidden.end}, {len(chain)} "
                f"tokens behind them, and {sorted(parts)}"
            )
        self.caches, self.ids, self.hidden = caches, array("i", ids), hidden
        self.chain, self.output = chain, None

    def drop_chain(self) -> None:
        """Drop the rows that were written from the head's own output."""
        extra = self.written - self.covered
        if extra > 0:
            for cache in self.caches:
                cache.rewind(extra)
        del self.chain[1:]
        self.output = None


def _fits(mark: MTPMark | None, position: int) -> bool:
    return mark is not None and mark.position == position and mark.hidden is not None

"""The life of a block drafter: context rows of final positions, and blocks that leave no trace.

The context's rows come from the target's streams (taps) of rows that are final. A block stands
behind them, is computed in one pass of the drafter's own full width, and is forgotten.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx

from turbospark.caches.base import RowCache
from turbospark.caches.parts import export_parts, split_parts
from turbospark.errors import CheckpointError, ProducerError, RewindError
from turbospark.protocols import ForwardOutput, Phase
from turbospark.speculation.captures import (
    RETAINED,
    CapturedRows,
    cache_arrays,
    check_finite,
    evaluate,
    export_caches,
    restore_caches,
)

SLACK = 128


class Blocks(Protocol):
    """What a family's block drafter module does."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose streams make a context row."""
        ...

    @property
    def rows(self) -> int:
        """Rows of a block: the anchor's, and one a proposal."""
        ...

    @property
    def width(self) -> int:
        """Of the taps of one position together."""
        ...

    def make_caches(self, max_context: int, slack: int) -> list[RowCache]:
        """Empty context rows of every layer."""
        ...

    def write(self, streams: mx.array, caches: Sequence[RowCache], phase: Phase) -> None:
        """Append the context rows of streams [T, width]."""
        ...

    def propose(self, anchor: int, caches: Sequence[RowCache]) -> tuple[mx.array, mx.array]:
        """Tokens [rows - 1] behind the anchor, and the hidden rows they come from."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DFlashMark:
    """The context at `position`, by reference: a ring overwrites what is behind its window."""

    position: int
    caches: tuple[RowCache, ...]
    streams: CapturedRows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, whoever else holds them."""
        return sum(cache.nbytes for cache in self.caches) + self.streams.nbytes


class DFlashState:
    """Context rows over one conversation.

    Args:
        make_caches: gives empty rows.
        width: of a position's streams.

    Attributes:
        caches: context rows of every layer, of final positions only.
        streams: taps of the positions behind them.
    """

    def __init__(self, make_caches: Callable[[], list[RowCache]], width: int) -> None:
        self._make_caches, self._width = make_caches, width
        self.caches = make_caches()
        self.streams = CapturedRows()

    @property
    def written(self) -> int:
        """Positions in the caches."""
        return self.caches[0].offset

    @property
    def cursor(self) -> int:
        """Positions followed, captured ones included."""
        return self.streams.end

    @property
    def nbytes(self) -> int:
        """Bytes of rows, written and captured."""
        return sum(cache.nbytes for cache in self.caches) + self.streams.nbytes

    def fork(self) -> "DFlashState":
        """An independent state; rows are shared until one side writes."""
        twin = DFlashState(self._make_caches, self._width)
        twin.caches = [cache.fork() for cache in self.caches]
        twin.streams = self.streams.copy()
        return twin

    def mark(self) -> DFlashMark | None:
        """The context as it is now; None where no row is ever overwritten."""
        if all(cache.rewind_bound is None for cache in self.caches):
            return None
        caches = tuple(cache.fork() for cache in self.caches)
        return DFlashMark(self.cursor, caches, self.streams.copy())

    def resume_at(self, keep: int, mark: DFlashMark | None = None) -> int:
        """The last position <= keep from which it can follow; 0 where the rows are gone."""
        keep = min(keep, self.cursor)
        if self._reaches(keep):
            return keep
        return keep if mark is not None and mark.position == keep else 0

    def rewind(self, position: int, mark: DFlashMark | None = None) -> None:
        """Stand at `position`; one ahead of the cursor moves nothing.

        Raises:
            RewindError: the rows that its window needs there are gone; nothing has moved.
        """
        if position >= self.cursor:
            return
        if position == 0:
            self.caches, self.streams = self._make_caches(), CapturedRows()
        elif self._reaches(position):
            back = max(0, self.written - position)
            for cache in self.caches:
                cache.rewind(back)
            self.streams.cut(position)
        elif mark is not None and mark.position == position:
            self.caches = [cache.fork() for cache in mark.caches]
            self.streams = mark.streams.copy()
        else:
            raise RewindError(
                f"the block drafter at {self.cursor} tokens cannot go back to {position}: its "
                "window's rows there were overwritten; start over at 0"
            )

    def export(self) -> dict[str, mx.array]:
        """Context rows and captured streams."""
        return export_parts(export_caches(self.caches) | {"streams": self.streams.export()})

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave.

        Raises:
            CheckpointError: it is of another drafter, or damaged; nothing has changed.
        """
        parts = split_parts(arrays)
        streams = CapturedRows.restored(parts.pop("streams", {}), self._width)
        caches = self._make_caches()
        written = restore_caches(caches, parts)
        if parts or streams.start != written:
            raise CheckpointError(
                f"the block drafter's arrays contradict one another: {written} rows, streams from "
                f"{streams.start} on, and {sorted(parts)}"
            )
        self.caches, self.streams = caches, streams

    def _reaches(self, position: int) -> bool:
        """Whether the rows that a block at `position` sees are all there."""
        back = self.written - position
        return position == 0 or back <= min(cache.max_rewind() for cache in self.caches)


class DFlashDrafter:
    """Drafts whole blocks from the target's streams.

    Args:
        module: the family's, weights set and units bound.
        slack: context rows that rings keep beyond their windows, to be rewound.
    """

    name = "dflash"
    block_passes = True
    hidden = False

    def __init__(self, module: Blocks, *, slack: int = SLACK) -> None:
        self.module = module
        self._slack = slack
        self.max_block = module.rows - 1
        self.taps = module.taps

    def __repr__(self) -> str:
        return f"DFlashDrafter(max_block={self.max_block}, taps={self.taps})"

    def new_state(self, max_context: int) -> DFlashState:
        """An empty state."""
        return DFlashState(
            lambda: self.module.make_caches(max_context, self._slack), self.module.width
        )

    def observe(
        self, state: DFlashState, ids: Sequence[int], start: int, output: ForwardOutput
    ) -> None:
        """Capture the streams of final rows; write context rows once many wait.

        Raises:
            ProducerError: the rows are not those that come next, or are missing.
            NonFiniteError: a stream holds NaN or infinity.
        """
        missing = [tap for tap in self.taps if tap not in output.taps]
        if missing:
            raise ProducerError(f"the block drafter was not given the taps {missing}")
        streams = mx.concatenate([output.taps[tap] for tap in self.taps], axis=-1)
        if streams.shape[0] != len(ids) - start:
            raise ProducerError(
                f"the block drafter was given {streams.shape[0]} rows for the tokens {start} to "
                f"{len(ids) - 1}"
            )
        if start != state.cursor:
            raise ProducerError(
                f"the block drafter follows {state.cursor} tokens and was given the streams from "
                f"{start} on; rewind it first, or start over where it has a hole"
            )
        state.streams.append(streams)
        if len(state.streams) > RETAINED:
            self._write(state)

    def prime(self, state: DFlashState, ids: Sequence[int], anchor: int) -> None:
        """Write the context rows of all of `ids`; the anchor has none.

        Raises:
            ProducerError: the state does not stand behind `ids`.
            NonFiniteError: a stream holds NaN or infinity.
        """
        if state.cursor != len(ids):
            raise ProducerError(f"the block drafter follows {state.cursor} tokens of {len(ids)}")
        self._write(state)

    def step(self, state: DFlashState, token: int, position: int) -> mx.array:
        """Refused: a block is one pass."""
        raise ProducerError("the block drafter proposes whole blocks and has no draft step")

    def block(self, state: DFlashState, ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """Exactly `count` proposals after `anchor`, the first ones of a block of full width.

        Raises:
            ProducerError: `count` is no number of proposals, or the state is not behind `ids`.
            NonFiniteError: a stream or the block itself holds NaN or infinity.
        """
        if not 1 <= count <= self.max_block:
            raise ProducerError(
                f"{count} proposals were asked of a block drafter that gives 1 to {self.max_block}"
            )
        self.prime(state, ids, anchor)
        tokens, hidden = self.module.propose(anchor, state.caches)
        check_finite(hidden, len(ids) + 1, "the block drafter's own row", tokens)
        return cast("list[int]", tokens.tolist())[:count]

    def _write(self, state: DFlashState) -> None:
        streams = state.streams
        if not len(streams):
            return
        rows = streams.between(streams.start, streams.end)
        check_finite(rows, streams.start, "a stream of the target")
        self.module.write(rows, state.caches, Phase.PREFILL)
        state.streams = CapturedRows(streams.end)
        evaluate(*cache_arrays(state.caches))

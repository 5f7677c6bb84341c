"""Drafters that follow a script, and refuse to draft where they have not followed.

How good one is: "perfect" proposes what the target says, "useless" never does, "alternating" does
so at even positions. A step drafter writes a row once it knows the token after it; a block drafter
writes every row at once. What they have written can be held against `rows_of`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from turbospark.protocols import ForwardOutput
from turbospark.testing.models import LogitsOf, fingerprints

Quality = Literal["perfect", "useless", "alternating"]
Row = tuple[float, ...]
"""What a drafter wrote: the fingerprint of a row, and for a step drafter the token after it."""

CHAINED = (-1.0, -1.0, -1.0)
"""The fingerprint of a row that a draft step has written from its own output."""


def spoil(logits: Any, position: int, quality: Quality) -> Any:
    """What a drafter of some quality says where the target says `logits`, of the token there."""
    wrong = quality == "useless" or (quality == "alternating" and position % 2 == 1)
    return np.roll(logits, 1) if wrong else logits


class ScriptedDrafterState:
    """Rows written and rows captured.

    Args:
        pairs: whether a row is written together with the token after it.

    Attributes:
        rows: what was written, one a position.
        captured: fingerprints of rows that were fed and wait for the token after them.
        ids: the text up to the last row.
        chain: tokens of the draft steps since the last observed row.
        furthest: the most rows it ever held.
        observed: (start, rows) of every call of `observe`.
    """

    def __init__(self, *, pairs: bool) -> None:
        self.pairs = pairs
        self.rows: list[Row] = []
        self.captured: list[Row] = []
        self.ids: list[int] = []
        self.chain: list[int] = []
        self.furthest = 0
        self.observed: list[tuple[int, int]] = []

    @property
    def cursor(self) -> int:
        """The position of the next row it writes."""
        return len(self.rows)

    @property
    def covered(self) -> int:
        """Rows written or captured."""
        return len(self.rows) + len(self.captured)

    @property
    def nbytes(self) -> int:
        """Sixteen bytes a row."""
        return 16 * self.covered

    def write(self, row: Row) -> None:
        """Write the next row."""
        self.rows.append(row)
        self.furthest = max(self.furthest, len(self.rows))

    def fork(self) -> "ScriptedDrafterState":
        """An independent copy."""
        twin = ScriptedDrafterState(pairs=self.pairs)
        twin.rows, twin.captured, twin.ids = [*self.rows], [*self.captured], [*self.ids]
        twin.chain, twin.furthest = [*self.chain], self.furthest
        return twin

    def mark(self) -> tuple[int, tuple[Row, ...]]:
        """The cursor, and what is captured."""
        return self.cursor, tuple(self.captured)

    def resume_at(self, keep: int, mark: Any = None) -> int:
        """The last position <= keep from which it can follow; 0 where it has a hole."""
        if mark is not None and mark[0] <= self.cursor and mark[0] + len(mark[1]) == keep:
            return keep
        if self.covered < keep:
            return 0
        if not self.pairs or self.cursor < keep:
            return keep
        return keep - 1  # row keep - 1 was written with a token that may be another now

    def rewind(self, position: int, mark: Any = None) -> None:
        """Stand at a position."""
        if mark is not None:
            del self.rows[mark[0] :]
            self.captured = list(mark[1])
        if position > self.covered:
            raise AssertionError(f"rewind to {position} of {self.covered} rows")
        del self.rows[position:]
        del self.captured[position - len(self.rows) :]
        del self.ids[position:]
        self.chain = []

    def export(self) -> dict[str, mx.array]:
        """Rows, captures and ids."""
        return {
            "rows": mx.array(np.array(self.rows, dtype=np.float32).reshape(-1, 3 + self.pairs)),
            "captured": mx.array(np.array(self.captured, dtype=np.float32).reshape(-1, 3)),
            "ids": mx.array(np.array(self.ids, dtype=np.int32)),
        }

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave."""
        self.rows = [tuple(row) for row in np.asarray(arrays["rows"]).tolist()]
        self.captured = [tuple(row) for row in np.asarray(arrays["captured"]).tolist()]
        self.ids = np.asarray(arrays["ids"]).tolist()


class ScriptedDrafter:
    """A drafter that knows the target's script.

    Args:
        logits_of: the target's own.
        quality: see above.
        block_passes: a block drafter rather than a step drafter.
        max_block: proposals of a round at most.
    """

    name = "scripted"

    def __init__(
        self,
        logits_of: LogitsOf,
        quality: Quality = "perfect",
        *,
        block_passes: bool = False,
        max_block: int = 8,
    ) -> None:
        self.quality: Quality = quality
        self.block_passes = block_passes
        self.max_block = max_block
        self.hidden = not block_passes
        self.taps: tuple[int, ...] = (1, 3) if block_passes else ()
        self._logits_of = logits_of

    def __repr__(self) -> str:
        return f"ScriptedDrafter({self.quality!r}, block_passes={self.block_passes})"

    def new_state(self, max_context: int) -> ScriptedDrafterState:
        """An empty state."""
        return ScriptedDrafterState(pairs=not self.block_passes)

    def rows_of(self, ids: Sequence[int], anchor: int | None = None) -> list[Row]:
        """The rows of one that has seen all of `ids`, and the token after them if it is given."""
        rows: list[Row] = [tuple(row) for row in fingerprints(ids).tolist()]
        if self.block_passes:
            return rows
        following = [*ids[1:], *([] if anchor is None else [anchor])]
        return [(*row, float(token)) for row, token in zip(rows, following, strict=False)]

    def observe(
        self, state: ScriptedDrafterState, ids: Sequence[int], start: int, output: ForwardOutput
    ) -> None:
        """Take the rows of ids[start:], which must be the next ones."""
        given = self._rows_in(output)
        if start != state.covered:
            raise AssertionError(f"rows from {start} given, {state.covered} are covered")
        if len(given) != len(ids) - start:
            raise AssertionError(f"{len(given)} rows given for {len(ids) - start} tokens")
        expected = fingerprints(ids, start).tolist()
        if [list(row) for row in given] != expected:
            raise AssertionError("the rows are not those of the tokens")
        state.observed.append((start, len(given)))
        state.captured.extend(given)
        state.ids, state.chain = list(ids), []
        self._write_known(state, ids)

    def prime(self, state: ScriptedDrafterState, ids: Sequence[int], anchor: int) -> None:
        """Write the row of the last id too, whose following token is `anchor`."""
        if state.covered != len(ids):
            raise AssertionError(f"primed at {len(ids)}, {state.covered} rows are covered")
        self._write_known(state, [*ids, anchor])
        state.chain = [anchor]

    def step(self, state: ScriptedDrafterState, token: int, position: int) -> mx.array:
        """Write the row `position`; logits [V] of the token at `position` + 2."""
        if position != state.cursor:
            raise AssertionError(f"a draft step at {position}, cursor at {state.cursor}")
        if len(state.captured) > 1:
            raise AssertionError(f"{len(state.captured)} captured rows were left unwritten")
        row = state.captured.pop() if state.captured else CHAINED
        state.write((*row, float(token)))
        state.chain.append(token)
        text = [*state.ids, *state.chain]
        if len(text) != position + 2:
            raise AssertionError(f"a draft step at {position} over a text of {len(text)} tokens")
        logits = spoil(self._logits_of(text), position + 2, self.quality)
        return mx.array(logits.astype(np.float32))

    def block(
        self, state: ScriptedDrafterState, ids: Sequence[int], anchor: int, count: int
    ) -> list[int]:
        """Exactly `count` proposals after `anchor`."""
        if state.covered != len(ids) or state.ids != list(ids):
            raise AssertionError(f"a block at {len(ids)}, {state.covered} rows are covered")
        text, proposals = [*ids, anchor], list[int]()
        for _ in range(count):
            logits = self._logits_of(text)
            proposals.append(int(np.argmax(spoil(logits, len(text), self.quality))))
            text.append(int(np.argmax(logits)))
        return proposals

    def _rows_in(self, output: ForwardOutput) -> list[Row]:
        if self.block_passes:
            arrays = [output.taps[layer] for layer in self.taps]
            if not all(mx.array_equal(arrays[0], other) for other in arrays):
                raise AssertionError("the taps are of different rows")
            array = arrays[0]
        elif output.hidden is None:
            raise AssertionError("this drafter needs the hidden rows")
        else:
            array = output.hidden
        return [tuple(row) for row in np.asarray(array).tolist()]

    def _write_known(self, state: ScriptedDrafterState, ids: Sequence[int]) -> None:
        while state.captured and (not state.pairs or state.cursor + 1 < len(ids)):
            row = state.captured.pop(0)
            state.write((*row, float(ids[state.cursor + 1])) if state.pairs else row)

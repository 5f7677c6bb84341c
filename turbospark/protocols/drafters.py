"""What proposes tokens, and what it remembers of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

from turbospark.protocols.models import ForwardOutput


class DrafterState(Protocol):
    """What a drafter remembers of one conversation: it belongs to the session.

    `cursor` is the position of the next row it writes. What it has captured of rows that were fed
    but not written yet counts as covered.
    """

    @property
    def cursor(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def fork(self) -> Any:
        """An independent state with the same content."""
        ...

    def mark(self) -> Any:
        """What a rewind to this very position needs beside the written rows, by reference.

        Its `nbytes` count against the budget of checkpoints.
        """
        ...

    def resume_at(self, keep: int, mark: Any = None) -> int:
        """The last position <= keep from which it can follow; 0 where it has a hole.

        Args:
            keep: how many fed tokens the target can keep; the one after them may be another.
            mark: what `mark` gave at that position, if it was called there.
        """
        ...

    def rewind(self, position: int, mark: Any = None) -> None:
        """Stand where the target stands: at a position that `resume_at` gave."""
        ...

    def export(self) -> dict[str, mx.array]:
        """The content as arrays, for a file."""
        ...

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave; raises CheckpointError and changes nothing otherwise."""
        ...


class Drafter(Protocol):
    """Proposes tokens that the target then verifies. It keeps nothing between calls.

    Attributes of an implementation: `name` ("off", "ngram", "mtp", "dflash", "model");
    `block_passes`, whether `block` serves it rather than `step`; `max_block`, the most proposals
    of a round; `hidden` and `taps`, what it needs of every forward pass of the target. One that
    needs `hidden` needs the final norm of headless prefill too.
    """

    @property
    def name(self) -> str: ...

    @property
    def block_passes(self) -> bool: ...

    @property
    def max_block(self) -> int: ...

    @property
    def hidden(self) -> bool: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def new_state(self, max_context: int) -> Any:
        """The `DrafterState` of an empty conversation."""
        ...

    def observe(self, state: Any, ids: Sequence[int], start: int, output: ForwardOutput) -> None:
        """Follow the target over rows that are final.

        Args:
            state: advanced: rows whose following token is known are written, the rest captured.
            ids: every fed id, these rows' own included.
            start: position of the output's first row.
            output: hidden rows and taps, cut to ids[start:].
        """
        ...

    def prime(self, state: Any, ids: Sequence[int], anchor: int) -> None:
        """Bring `state` up to all of `ids`, whose following token `anchor` is now known."""
        ...

    def step(self, state: Any, token: int, position: int) -> mx.array:
        """One draft step: logits [V] of the token at `position` + 2.

        Args:
            state: advanced by the row `position`.
            token: the token at `position` + 1.
            position: the state's cursor, or ProducerError.
        """
        ...

    def block(self, state: Any, ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """At most `count` proposals for the tokens after `anchor`, which follows `ids`.

        Exactly `count` from a drafter that always has an opinion; n-gram lookup may give fewer
        or none.
        """
        ...

"""The life of a multi-token-prediction head: rows that follow the target, and chained drafts.

Row i of the head needs the target's hidden row i and the token i + 1. Hidden rows are captured as
they come; those whose token is known are written in batches. A draft step writes the newest row
with the token just chosen, further steps chain the head's own output. Chained rows are dropped by
the rewind that ends a round, and the target's hidden rows take their place.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from turbospark.caches.kv import KVCache
from turbospark.errors import ProducerError
from turbospark.protocols import ForwardOutput, Phase
from turbospark.speculation.captures import RETAINED, cache_arrays, check_finite, evaluate
from turbospark.speculation.mtp_state import MTPState

MAX_BLOCK = 15


class Head(Protocol):
    """What a family's head module does."""

    @property
    def width(self) -> int:
        """C."""
        ...

    def make_caches(self, max_context: int) -> list[KVCache]:
        """Empty rows."""
        ...

    def __call__(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[KVCache], phase: Phase
    ) -> mx.array:
        """Advance by T rows: the head's final norm [T, C]."""
        ...

    def write(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[KVCache], phase: Phase
    ) -> None:
        """Append T rows and compute nothing else."""
        ...

    def logits(self, y: mx.array, phase: Phase) -> mx.array:
        """Logits [R, V]."""
        ...


class MTPDrafter:
    """Drafts with a head over the target's hidden rows.

    Args:
        head: the family's module, weights set and units bound.
        max_block: proposals of a round at most.
    """

    name = "mtp"
    block_passes = False
    hidden = True
    taps: tuple[int, ...] = ()

    def __init__(self, head: Head, *, max_block: int = MAX_BLOCK) -> None:
        self.head = head
        self.max_block = max_block

    def __repr__(self) -> str:
        return f"MTPDrafter(max_block={self.max_block})"

    def new_state(self, max_context: int) -> MTPState:
        """An empty state."""
        return MTPState(lambda: self.head.make_caches(max_context), self.head.width)

    def observe(
        self, state: MTPState, ids: Sequence[int], start: int, output: ForwardOutput
    ) -> None:
        """Capture hidden rows; write rows once many wait.

        Raises:
            ProducerError: the rows are not those that come next, or are missing.
            NonFiniteError: a hidden row holds NaN or infinity.
        """
        hidden = output.hidden
        if hidden is None or hidden.shape[0] != len(ids) - start:
            given = "no hidden rows" if hidden is None else f"{hidden.shape[0]} hidden rows"
            raise ProducerError(
                f"the prediction head was given {given} for the tokens {start} to {len(ids) - 1}"
            )
        if start != state.covered:
            raise ProducerError(
                f"the prediction head follows {state.covered} tokens and was given the hidden "
                f"rows from {start} on; rewind it first, or start over where it has a hole"
            )
        self._settle(state, ids[start])
        state.chain.clear()
        state.ids.extend(ids[start:])
        state.hidden.append(hidden)
        if state.covered - state.written > RETAINED:
            self._write(state)

    def prime(self, state: MTPState, ids: Sequence[int], anchor: int) -> None:
        """Write the newest row too, whose token is `anchor`.

        Raises:
            ProducerError: the state does not stand behind `ids`.
            NonFiniteError: a hidden row holds NaN or infinity.
        """
        if state.covered != len(ids):
            raise ProducerError(f"the prediction head follows {state.covered} tokens of {len(ids)}")
        self._settle(state, anchor)
        if ids and state.cursor < len(ids):
            self._advance(state, anchor)

    def step(self, state: MTPState, token: int, position: int) -> mx.array:
        """One draft step: logits [V] of the token at `position` + 2.

        Raises:
            ProducerError: `position` is not the cursor, or no hidden row is known there.
            NonFiniteError: the hidden row holds NaN or infinity.
        """
        if position != state.cursor or position < 0 or not state.covered:
            raise ProducerError(
                f"a draft step at position {position}, but the prediction head's next row is "
                f"{state.cursor}"
            )
        y = self._advance(state, token)
        return self.head.logits(y, Phase.DECODE)[0]

    def block(self, state: MTPState, ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """Refused: the head drafts step by step."""
        raise ProducerError("the prediction head drafts step by step and has no block pass")

    def _settle(self, state: MTPState, token: int) -> None:
        """Drop chained rows, and the newest row if another token than `token` was behind it."""
        state.drop_chain()
        if not state.chain or state.chain[0] == token:
            return
        if not len(state.hidden):
            raise ProducerError(
                f"the prediction head's row {state.covered - 1} was written for token "
                f"{state.chain[0]}, but {token} follows, and its hidden row is gone; rewind to "
                "where resume_at says"
            )
        for cache in state.caches:
            cache.rewind(1)
        state.chain.clear()

    def _write(self, state: MTPState) -> None:
        """Write every row whose token is known, and keep the newest hidden rows only."""
        first, last = state.written, state.covered - 1
        if last > first:
            hidden = state.hidden.between(first, last)
            check_finite(hidden, first, "the target's hidden row")
            tokens = mx.array(list(state.ids[first + 1 : last + 1]), mx.int32)
            self.head.write(tokens, hidden, state.caches, Phase.PREFILL)
        state.hidden.drop(state.covered - RETAINED)
        evaluate(*cache_arrays(state.caches), *state.hidden.arrays())

    def _advance(self, state: MTPState, token: int) -> mx.array:
        """Write the row at the cursor: the head's final norm [1, C]."""
        position = state.cursor
        if position < state.covered:
            self._write(state)
            hidden, what = state.hidden.between(position, position + 1), "the target's hidden row"
        elif state.output is not None:
            hidden, what = state.output, "the prediction head's own output"
        else:
            raise ProducerError(
                f"the prediction head has no hidden row of position {position}: the target has "
                "not been there, and no draft step led there"
            )
        check_finite(hidden, position, what)
        y = self.head(mx.array([token], mx.int32), hidden, state.caches, Phase.DECODE)
        state.chain.append(token)
        state.output = y
        return y

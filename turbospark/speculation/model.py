"""Drafting with another, smaller model: it reads the same tokens and needs nothing of the target.

It has its own caches and catches up by itself: on tokens that were fed without it, in chunks, and
after a round on those that differ from its proposals. A recurrent one goes back to a checkpoint.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.caches.rollback import checkpoint, max_row_rewind, rollback
from turbospark.errors import CheckpointError, ProducerError, TurbosparkError
from turbospark.protocols import CausalModel, ForwardOutput, Phase, RollbackPoint
from turbospark.speculation.captures import (
    check_finite,
    evaluate,
    export_caches,
    export_parts,
    ids_array,
    ids_of,
    restore_caches,
    split_parts,
)

MAX_BLOCK = 15
CHUNK = 256
"""Tokens of a pass of its own prefill; passes end at multiples of it."""
SLACK = 128
_FEW = 16  # tokens to catch up on that go along with a draft step
_NEVER = -1e30  # the logit of a token that the draft model does not have


@dataclass(frozen=True, slots=True, eq=False)
class ModelMark:
    """The draft model's recurrent states at some position, by reference."""

    point: RollbackPoint

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(item.nbytes for state in self.point.recurrent.values() for item in state)


class ModelState:
    """Caches of the draft model over one conversation.

    Args:
        make_caches: gives empty caches.

    Attributes:
        caches: they hold `fed`, whatever has become of these tokens since.
        fed: tokens in the caches.
        ids: tokens the target was fed.
        chain: tokens of the draft steps since; the first stands behind `ids`.
        points: positions of the text that recurrent caches can go back to.
    """

    def __init__(self, make_caches: Callable[[], list[Any]]) -> None:
        self._make_caches = make_caches
        self.caches = make_caches()
        self.fed = array("i")
        self.ids = array("i")
        self.chain: list[int] = []
        self.points: list[RollbackPoint] = []
        self._agreed = 0

    @property
    def cursor(self) -> int:
        """The position before that of the next token it wants."""
        return max(0, len(self.ids) + len(self.chain) - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def is_recurrent(self) -> bool:
        """Whether some of its caches go back to checkpoints only."""
        return any(cache.recurrent for cache in self.caches)

    def fork(self) -> "ModelState":
        """An independent state; rows are shared until one side writes."""
        twin = ModelState(self._make_caches)
        twin.caches = [cache.fork() for cache in self.caches]
        twin.fed, twin.ids = array("i", self.fed), array("i", self.ids)
        twin.chain, twin.points, twin._agreed = [*self.chain], [*self.points], self._agreed
        return twin

    def mark(self) -> ModelMark | None:
        """The recurrent states, where the caches hold nothing but the text; None if they do."""
        agreed = self.agree()
        if not self.is_recurrent or agreed < len(self.fed) or agreed > len(self.ids):
            return None
        return ModelMark(checkpoint(self.caches))

    def resume_at(self, keep: int, mark: ModelMark | None = None) -> int:
        """Anywhere: it reads up what it lacks."""
        return keep

    def rewind(self, position: int, mark: ModelMark | None = None) -> None:
        """Forget the tokens from `position` on; the caches follow when they are next needed."""
        del self.ids[position:]
        self.end_chain()
        self.points = [point for point in self.points if point.position <= position]
        if mark is not None and mark.point.position <= position:
            self.points.append(mark.point)

    def export(self) -> dict[str, mx.array]:
        """Caches, the tokens in them, and the text."""
        text = {"fed": ids_array(self.fed), "text": ids_array(self.ids)}
        return export_parts(export_caches(self.caches) | text)

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave.

        Raises:
            CheckpointError: it is of another model, or damaged; nothing has changed.
        """
        parts = split_parts(arrays)
        fed = ids_of(parts.pop("fed", {}), "the tokens fed")
        ids = ids_of(parts.pop("text", {}), "the text")
        caches = self._make_caches()
        if restore_caches(caches, parts) != len(fed) or parts:
            raise CheckpointError(
                f"the draft model's arrays contradict one another: {len(fed)} tokens, caches at "
                f"{caches[0].offset}, and {sorted(parts)}"
            )
        self.caches, self.fed, self.ids = caches, array("i", fed), array("i", ids)
        self.chain, self.points, self._agreed = [], [], 0

    def end_chain(self) -> None:
        """Forget the tokens of draft steps; what the caches hold of them is compared anew."""
        self.chain = []
        self._agreed = min(self._agreed, len(self.ids))

    def text(self, start: int) -> list[int]:
        """What stands from position `start` on, draft steps included."""
        known = len(self.ids)
        return [*self.ids[start:], *self.chain] if start < known else self.chain[start - known :]

    def agree(self) -> int:
        """How many tokens of the caches are those of the text."""
        text = self.text(self._agreed)
        for fed, wanted in zip(self.fed[self._agreed :], text, strict=False):
            if fed != wanted:
                break
            self._agreed += 1
        return self._agreed

    def settle(self, most: int) -> None:
        """Take the caches back to where they agree with the text, and hold `most` at most.

        Recurrent ones go to a point before that; where there is none, or rows are gone, the
        caches are emptied.
        """
        agreed = min(self.agree(), most)
        if agreed == len(self.fed):
            return
        points = [RollbackPoint(agreed)]
        if self.is_recurrent:
            points = [point for point in self.points if point.position <= agreed]
        best = max(points, key=lambda point: point.position, default=None)
        if best is None or len(self.fed) - best.position > max_row_rewind(self.caches):
            self.clear()
            return
        rollback(self.caches, best)
        del self.fed[best.position :]
        self._agreed = best.position

    def clear(self) -> None:
        """Empty the caches; the text stays."""
        self.caches, self._agreed, self.points = self._make_caches(), 0, []
        del self.fed[:]

    def note(self, tokens: Sequence[int]) -> None:
        """Count tokens of the text that the caches have taken."""
        self.fed.extend(tokens)
        self._agreed = len(self.fed)


class ModelDrafter:
    """Drafts with another model, step by step.

    Args:
        model: with the target's tokens; weights set and units bound.
        vocab_size: of the target's logits.
        max_block: proposals of a round at most.
    """

    name = "model"
    block_passes = False
    hidden = False
    taps: tuple[int, ...] = ()

    def __init__(self, model: CausalModel, vocab_size: int, *, max_block: int = MAX_BLOCK) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.max_block = max_block

    def __repr__(self) -> str:
        return f"ModelDrafter(max_block={self.max_block})"

    def new_state(self, max_context: int) -> ModelState:
        """An empty state."""
        return ModelState(lambda: self.model.make_caches(max_context, SLACK))

    def observe(
        self, state: ModelState, ids: Sequence[int], start: int, output: ForwardOutput
    ) -> None:
        """Note the tokens, those it missed too; read whole chunks up.

        Raises:
            ProducerError: the tokens lie before those it has.
        """
        known = len(state.ids)
        if start < known:
            raise ProducerError(
                f"the draft model follows {known} tokens and was given those from {start} on; "
                "rewind it first"
            )
        state.end_chain()
        state.ids.extend(ids[known:])
        if len(state.ids) - len(state.fed) >= CHUNK:
            self._read_up(state, len(state.ids) // CHUNK * CHUNK)

    def prime(self, state: ModelState, ids: Sequence[int], anchor: int) -> None:
        """Read all of `ids` up; the anchor comes with the next draft step."""
        if list(state.ids) != list(ids):
            raise ProducerError(
                f"the draft model follows {len(state.ids)} tokens, other than the {len(ids)} given"
            )
        state.end_chain()
        self._read_up(state, len(state.ids))

    def step(self, state: ModelState, token: int, position: int) -> mx.array:
        """One draft step: logits [V] of the token at `position` + 2.

        Raises:
            ProducerError: `position` is not the cursor.
            NonFiniteError: the draft model's logits hold NaN or infinity.
        """
        if position != state.cursor or not state.ids:
            raise ProducerError(
                f"a draft step at position {position}, but the draft model's next is {state.cursor}"
            )
        state.chain.append(token)
        known = len(state.ids)
        state.settle(known + len(state.chain) - 1)
        pending = known - len(state.fed)
        if pending > _FEW or (pending > 0 and state.is_recurrent):
            self._read_up(state, known)
        if state.is_recurrent and len(state.fed) == known:
            state.points = [checkpoint(state.caches)]
        rows = self._feed(state, state.text(len(state.fed)), Phase.DECODE, head=True)
        check_finite(rows, position + 2, "the draft model's row of logits")
        return _fitted(rows[0], self.vocab_size)

    def block(self, state: ModelState, ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """Refused: the model drafts step by step."""
        raise ProducerError("a draft model drafts step by step and has no block pass")

    def _read_up(self, state: ModelState, end: int) -> None:
        """Feed the text up to position `end`; passes end at multiples of the chunk."""
        state.settle(end)
        while len(state.fed) < end:
            start = len(state.fed)
            upto = min(end, (start // CHUNK + 1) * CHUNK)
            self._feed(state, list(state.ids[start:upto]), Phase.PREFILL, head=False)

    def _feed(self, state: ModelState, tokens: list[int], phase: Phase, *, head: bool) -> mx.array:
        """One pass over the caches: logits [1, V], or the last layer's stream without `head`.

        Raises:
            ProducerError: it failed; the caches are empty and will be filled anew.
        """
        last = self.model.num_layers - 1
        try:
            output = self.model(
                mx.array(tokens, mx.int32),
                state.caches,
                phase=phase,
                logits="last" if head else "none",
                taps=() if head else (last,),
            )
            rows = output.logits if head else output.taps[last]
            if rows is None:
                raise ProducerError("the draft model returned no logits")
            evaluate(rows)
        except BaseException as error:
            state.clear()
            if isinstance(error, TurbosparkError) or not isinstance(error, Exception):
                raise
            raise ProducerError(
                f"a pass of the draft model failed ({type(error).__name__}: {error})"
            ) from error
        state.note(tokens)
        return rows


def _fitted(logits: mx.array, vocab_size: int) -> mx.array:
    """Logits of the target's vocabulary: rows of padding fall away, or are added."""
    count = logits.shape[0]
    if count >= vocab_size:
        return logits[:vocab_size]
    return mx.pad(logits, (0, vocab_size - count), constant_values=mx.array(_NEVER))

"""Drafting with another, smaller model: it reads the same tokens and needs nothing of the target.

It has its own caches and catches up by itself: on tokens that were fed without it, in chunks, and
after a round on those that differ from its proposals. A recurrent one goes back to a checkpoint.
"""

from collections.abc import Sequence

import mlx.core as mx

from turbospark.caches.rollback import checkpoint
from turbospark.errors import ProducerError, TurbosparkError
from turbospark.protocols import CausalModel, ForwardOutput, Phase
from turbospark.speculation.captures import check_finite, evaluate
from turbospark.speculation.model_state import ModelState

MAX_BLOCK = 15
CHUNK = 256
"""Tokens of a pass of its own prefill; passes end at multiples of it."""
SLACK = 128
_FEW = 16  # tokens to catch up on that go along with a draft step
_NEVER = -1e30  # the logit of a token that the draft model does not have


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
        last, known = self.model.num_layers - 1, self.model.vocab_size
        # A token that only the target's padding has can cost a proposal, and nothing else.
        ids = [token if token < known else 0 for token in tokens]
        try:
            output = self.model(
                mx.array(ids, mx.int32),
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

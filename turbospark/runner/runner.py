"""The producer that a model and its live session make together."""

import threading
from collections.abc import Sequence

import mlx.core as mx

from turbospark.errors import ProducerError
from turbospark.protocols import CausalModel, Phase, Reuse
from turbospark.runner.forward import advance
from turbospark.sessions.prefix import decide_reuse
from turbospark.sessions.session import Session


class Runner:
    """Drives a model over one live session: the protocol the loops speak.

    Args:
        model: whose forward passes run.
        session: the live conversation.
        prefix_reuse: whether `try_reuse_prefix` may keep anything.

    Attributes:
        lock: held while a step of a generation runs; any one thread at a time may drive it.
    """

    def __init__(self, model: CausalModel, session: Session, *, prefix_reuse: bool = False) -> None:
        self.model = model
        self.session = session
        self.prefix_reuse = prefix_reuse
        self.lock = threading.RLock()
        self._turn = 0

    def begin_turn(self) -> int:
        """Announce a generation; those before it may not go on."""
        self._turn += 1
        return self._turn

    def check_turn(self, turn: int) -> None:
        """Refuse to go on with a generation that another one has ended."""
        if turn != self._turn:
            raise ProducerError(
                "this generation was ended by a later one on the same session; use a session "
                "of its own for each text that runs beside another"
            )

    def __repr__(self) -> str:
        return f"Runner({type(self.model).__name__}, {self.session!r})"

    def reset(self) -> None:
        """Drop the live conversation and start at position 0."""
        self.session.reset()

    def try_reuse_prefix(self, prompt: Sequence[int]) -> Reuse:
        """Take the session back to what it shares with a prompt, where its caches can."""
        session = self.session
        reuse = decide_reuse(
            session.fed_ids,
            prompt,
            position=session.position,
            max_rewind=session.max_rewind,
            enabled=self.prefix_reuse,
        )
        if reuse.tokens:
            session.rewind_to(reuse.tokens)
        return reuse

    def produce(self, token: int, position: int) -> mx.array:
        """Run one sampled token; return the logits [V] that follow it.

        Raises:
            ProducerError: `position` is not the cursor (nothing was fed), or the pass failed and
                the session is tainted.
        """
        logits = self._run([token], position, Phase.DECODE, head=True)
        assert logits is not None
        return logits

    def produce_prefill(self, token: int, position: int) -> None:
        """Run one prompt token without the output head."""
        self._run([token], position, Phase.PREFILL, head=False)

    def supports_chunked_prefill(self) -> bool:
        """Every model of the one forward call takes chunks."""
        return True

    def prefill_chunk(
        self, tokens: Sequence[int], start: int, is_final: bool = True
    ) -> mx.array | None:
        """Run prompt tokens in one pass; return the last one's logits [V] when `is_final`.

        Raises:
            ProducerError: there is no token or `start` is not the cursor (nothing was fed), or
                the pass failed and the session is tainted.
        """
        return self._run(tokens, start, Phase.PREFILL, head=is_final)

    def _run(
        self, tokens: Sequence[int], start: int, phase: Phase, *, head: bool
    ) -> mx.array | None:
        if not tokens:
            raise ProducerError("a pass needs at least one token")
        if start != self.session.position:
            raise ProducerError(
                f"tokens for position {start} were given to {self!r}: the next position is "
                f"{self.session.position}"
            )
        return advance(self.model, self.session, tokens, phase=phase, head=head)

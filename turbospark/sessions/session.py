"""One conversation: all of its state, moved together."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.caches.rollback import checkpoint, max_row_rewind, rollback
from turbospark.errors import OptionError, ProducerError
from turbospark.protocols import RollbackPoint
from turbospark.sessions.checkpoints import Checkpoint, Checkpoints
from turbospark.sessions.fed_ids import FAILED, FedIds
from turbospark.sessions.prefix import Candidate, Decision

MakeCaches = Callable[[], list[Any]]


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A verify whose rows do not count yet.

    Attributes:
        epoch: of its `Verified`.
        start: position of its first row.
        cut: whether rows were already taken back.
    """

    epoch: int
    start: int
    cut: bool = False


class Session:
    """Caches, fed ids and drafter state of one conversation.

    Args:
        make_caches: gives empty caches; called now and at every reset.
        max_context: tokens the caches may hold.
        make_drafter_state: gives the drafter's state of an empty conversation.
        checkpoints: keeps those of recurrent layers; by default with the default budget.

    Attributes:
        recurrent: whether there are caches that go back to checkpoints alone.
        drafter_state: what the drafter remembers; None where no drafter is open.
        draft_off: why this conversation is not drafted for now; an empty string where it is.
        prompt_end: tokens of the prompt that was fed last; 0 before one was fed to its end.
        pending: the last generated token, which belongs to the text and was not fed.
        extras: arrays of the conversation that no cache holds; they are saved and parked with it.
        open_round: a verify that was not settled; None between rounds.
        closed: whether its conversation was closed, so that nothing is fed to it any more.
        suspended: ends the generation that stands between two of its tokens; None without one.
        epoch: counts every pass, rewind, rollback and reset.
        opened_for: gives the model that the caches are of; None where nobody has said.
    """

    def __init__(
        self,
        make_caches: MakeCaches,
        max_context: int,
        *,
        make_drafter_state: Callable[[], Any] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._make_caches = make_caches
        self.make_drafter_state = make_drafter_state
        self.max_context = max_context
        self.checkpoints = Checkpoints() if checkpoints is None else checkpoints
        self.fed_ids = FedIds()
        self.epoch = 0
        self.opened_for: Callable[[], Any] | None = None
        self.closed = False
        self.suspended: Callable[[], None] | None = None
        self._begin()

    def __repr__(self) -> str:
        state = "tainted" if self.fed_ids.tainted else "live"
        return f"Session({self.position} of {self.max_context} tokens, {state})"

    @property
    def position(self) -> int:
        """Tokens the caches hold; also the position of the next one."""
        return self.caches[0].offset if self.caches else len(self.fed_ids)

    @property
    def text_ids(self) -> list[int]:
        """The ids of the text so far: those fed, and the one that was generated last."""
        return [*self.fed_ids.ids, *([] if self.pending is None else [self.pending])]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the drafter's state and the checkpoints."""
        drafter = 0 if self.drafter_state is None else self.drafter_state.nbytes
        return sum(cache.nbytes for cache in self.caches) + drafter + self.checkpoints.nbytes

    def candidate(self) -> Candidate:
        """What this session could offer a prompt."""
        return Candidate(
            self.fed_ids,
            self.position,
            max_row_rewind(self.caches),
            self.recurrent,
            self.checkpoints.all,
            self.drafter_state,
            self.prompt_end,
        )

    def check_model(self, model: Any) -> None:
        """Refuse a model that the caches are not of.

        Raises:
            OptionError: they were made for another one; nothing has moved.
        """
        if self.opened_for is not None and self.opened_for() is not model:
            raise OptionError(
                f"{self!r} was opened for another model than this {type(model).__name__}, which "
                "would misread its caches: take a session, or a prompt_cache, of this one"
            )

    def fresh_caches(self) -> list[Any]:
        """Empty caches like this session's own."""
        return self._make_caches()

    def reset(self) -> None:
        """Start over at position 0, the drafter too; a taint is lifted."""
        self.fed_ids.clear()
        self.checkpoints.clear()
        self.epoch += 1
        self._begin()

    def settle(self) -> None:
        """End a generation that was left between two of its tokens, whoever runs it."""
        close, self.suspended = self.suspended, None
        if close is not None:
            close()

    def record(self, tokens: Sequence[int], position: int) -> None:
        """Note that the caches have advanced over `tokens` from `position` on."""
        self.pending = None
        self.open_round = None
        self.fed_ids.record(tokens, position)

    def taint(self, reason: str = FAILED) -> None:
        """Say that caches and record may differ; only `reset` mends it."""
        self.fed_ids.taint(reason)
        self.epoch += 1

    def take_back(self, decision: Decision) -> None:
        """Go where a decision about this session says; it must be of this very moment.

        Raises:
            RewindError: a cache cannot go back as far; nothing has moved.
        """
        kept = decision.checkpoint
        self._go_to(decision.tokens, kept, drafts=not decision.draft_off)
        self.draft_off = decision.draft_off

    def keep_checkpoint(self, *, ends_prompt: bool = False) -> None:
        """Keep this position for recurrent layers, where there are any and nothing is open."""
        trusted = not self.fed_ids.tainted and self.open_round is None
        if not (self.recurrent and self.checkpoints.budget and trusted):
            return
        state = None if self.draft_off else self.drafter_state
        mark = None if state is None else state.mark()
        self.checkpoints.add(Checkpoint(checkpoint(self.caches), mark, ends_prompt))

    def moved_back(self, point: RollbackPoint) -> None:
        """Note that the caches went back to a point of the open round, or before it."""
        self.epoch += 1
        self.pending = None
        self.open_round = None
        self.fed_ids.rewind_to(point.position)
        self.checkpoints.drop_beyond(point.position)

    def fork(self) -> "Session":
        """An independent session with the same state; rows and states are shared till written.

        Raises:
            ProducerError: a verify is not settled.
        """
        if self.open_round is not None:
            raise ProducerError(f"{self!r} is in the midst of a speculative round; settle it first")
        twin = copy.copy(self)
        twin.caches = [cache.fork() for cache in self.caches]
        twin.fed_ids = self.fed_ids.copy()
        twin.checkpoints = self.checkpoints.copy()
        twin.extras = dict(self.extras)
        twin.suspended = None
        if self.drafter_state is not None:
            twin.drafter_state = self.drafter_state.fork()
        return twin

    def _begin(self) -> None:
        self.caches = self._make_caches()
        self.recurrent = any(cache.recurrent for cache in self.caches)
        make = self.make_drafter_state
        self.drafter_state: Any = None if make is None else make()
        self.draft_off = ""
        self.prompt_end = 0
        self.pending: int | None = None
        self.extras: dict[str, mx.array] = {}
        self.open_round: OpenRound | None = None

    def _go_to(self, position: int, kept: Checkpoint | None, *, drafts: bool) -> None:
        back = self.position - position
        if back:
            rollback(self.caches, RollbackPoint(position) if kept is None else kept.point)
            self.pending = None
            self.epoch += 1
        self.open_round = None
        self.fed_ids.rewind_to(position)
        self.checkpoints.drop_beyond(position)
        state, make = self.drafter_state, self.make_drafter_state
        if state is None:
            return
        if drafts:
            state.rewind(position, None if kept is None else kept.mark)
        elif state.cursor >= position and make is not None:
            self.drafter_state = make()  # its last rows are of tokens that were taken back

"""The decision about prefix reuse: pure, and it always says why."""

from collections.abc import Sequence
from dataclasses import dataclass

from turbospark.protocols import DrafterState
from turbospark.sessions.checkpoints import Checkpoint
from turbospark.sessions.fed_ids import FedIds


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """What one session could offer a prompt.

    Attributes:
        fed: the record of its state.
        position: tokens its caches hold.
        max_rewind: how many of them its caches of rows can take back.
        recurrent: whether it has recurrent layers, which go back to checkpoints alone.
        checkpoints: those that were kept, by ascending position.
        drafter: what the drafter remembers of it; None where nothing drafts.
        prompt_end: tokens of the prompt that was fed last; what lies behind is the reply to it.
    """

    fed: FedIds
    position: int
    max_rewind: int
    recurrent: bool = False
    checkpoints: Sequence[Checkpoint] = ()
    drafter: DrafterState | None = None
    prompt_end: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """How many of a prompt's tokens a session can stand for. Nothing has moved.

    Attributes:
        tokens: how many; 0 for none.
        reason: why it is not more.
        draft_off: why there can be no drafting after that; an empty string where there can.
        checkpoint: where recurrent layers go back to; None where nothing is taken back.
    """

    tokens: int
    reason: str
    draft_off: str = ""
    checkpoint: Checkpoint | None = None


NO_CHECKPOINT = (
    "its recurrent layers cannot go back to token {keep}, and no checkpoint lies before it"
)
HOLE = "the drafter has not seen all of the {keep} tokens"
REFED_FOR_DRAFTER = 32


def decide_reuse(
    candidate: Candidate, prompt: Sequence[int], *, prefer_reuse: bool = False
) -> Decision:
    """How many of a prompt's leading tokens a session can stand for.

    Args:
        candidate: the session.
        prompt: the ids to run.
        prefer_reuse: what to give up where the drafter has not seen all that the target could
            keep: drafting for this turn, or those tokens. A few are fed again in any case.
    """
    shared = _shared(candidate, prompt)
    if isinstance(shared, Decision):
        return shared
    found = _reachable(candidate, shared, with_drafter=True)
    if prefer_reuse and shared >= candidate.position - shared:
        more = _reachable(candidate, shared, with_drafter=False)
        reached = found.position if isinstance(found, _Place) else 0
        if isinstance(more, _Place) and more.position - reached > REFED_FOR_DRAFTER:
            return _kept(candidate, prompt, shared, more, HOLE.format(keep=more.position))
    if isinstance(found, Decision):
        return found
    return _kept(candidate, prompt, shared, found)


def is_shallow(candidate: Candidate, prompt: Sequence[int]) -> bool:
    """Whether a prompt would take back more of a session than it shares with it.

    The last prompt sent again takes the place of the reply to it, however long that is.
    """
    shared = candidate.fed.common_prefix(prompt)
    last = candidate.prompt_end - 1
    if shared == last == len(prompt) - 1 and candidate.fed[last : last + 1] == [prompt[last]]:
        return False
    return candidate.position - shared > shared


def _shared(candidate: Candidate, prompt: Sequence[int]) -> int | Decision:
    fed = candidate.fed
    if fed.tainted:
        return Decision(0, fed.taint_reason)
    if not len(fed):
        return Decision(0, "nothing was fed before")
    keep = fed.common_prefix(prompt)
    if keep == 0 and len(prompt) == 1:
        return Decision(0, "a prompt of one token has nothing before its last token")
    if keep == 0:
        return Decision(0, "the prompt differs from what was fed at token 0")
    if keep > candidate.position:
        return Decision(
            0, f"the caches hold {candidate.position} tokens where the record has {len(fed)}"
        )
    return keep


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    position: int
    checkpoint: Checkpoint | None = None


def _reachable(candidate: Candidate, shared: int, *, with_drafter: bool) -> _Place | Decision:
    """The last place among the shared tokens where target and drafter can stand alike."""
    drafter, limit = candidate.drafter, shared
    while True:
        place = _target_place(candidate, limit)
        if isinstance(place, Decision) or drafter is None or not with_drafter:
            return place
        position = place.position
        mark = None if place.checkpoint is None else place.checkpoint.mark
        follows = drafter.resume_at(position, mark)
        # Before the last shared token, the token that follows is the one it knows.
        knows_next = position < shared and drafter.resume_at(position + 1) >= position
        if follows == position or knows_next:
            return place
        if follows <= 0:
            one = "the one token it shares is fed again for the drafter"
            return Decision(0, one if position == 1 else HOLE.format(keep=position))
        limit = follows


def _target_place(candidate: Candidate, limit: int) -> _Place | Decision:
    position = candidate.position
    if limit == position:
        return _Place(limit)
    place = _Place(limit)
    if candidate.recurrent:
        kept = (kept for kept in reversed(candidate.checkpoints) if kept.position <= limit)
        checkpoint = next(kept, None)
        if checkpoint is None:
            return Decision(0, NO_CHECKPOINT.format(keep=limit))
        place = _Place(checkpoint.position, checkpoint)
    back = position - place.position
    if back > candidate.max_rewind:
        return Decision(
            0,
            f"going back {back} tokens is more than the {candidate.max_rewind} that the caches can",
        )
    return place


def _kept(
    candidate: Candidate, prompt: Sequence[int], shared: int, place: _Place, draft_off: str = ""
) -> Decision:
    tokens = place.position
    back = candidate.position - tokens
    if back == 0:
        reason = "the prompt continues what was fed"
    elif shared == len(prompt) - 1:
        reason = f"all of the prompt but its last token was fed; {back} taken back"
    else:
        reason = f"the prompt parts from what was fed at token {shared}; {back} taken back"
    if place.checkpoint is not None and tokens < shared:
        reason += f", to the recurrent layers' checkpoint at {tokens}"
    elif tokens < shared:
        reason += f", {shared - tokens} of them for the drafter"
    return Decision(tokens, reason, draft_off, place.checkpoint)

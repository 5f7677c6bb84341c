"""A runner over a scripted model: sessions, slots and drafting without weights."""

from turbospark.protocols import Drafter
from turbospark.runner.runner import Runner
from turbospark.sessions.checkpoints import DEFAULT_BYTES, DEFAULT_EVERY, Checkpoints
from turbospark.sessions.pool import SessionPool
from turbospark.sessions.session import Session
from turbospark.speculation.off import NoDrafter
from turbospark.testing.models import ScriptedModel


def scripted_runner(
    model: ScriptedModel | None = None,
    drafter: Drafter | None = None,
    *,
    slots: int = 1,
    max_context: int = 99,
    prefer_reuse: bool = False,
    checkpoint_bytes: int = DEFAULT_BYTES,
    checkpoint_every: int = DEFAULT_EVERY,
) -> Runner:
    """A runner that reuses prefixes.

    Args:
        model: a `ScriptedModel` of hashed logits by default.
        drafter: for instance a `ScriptedDrafter`; by default nothing drafts.
        slots: conversations kept, the live one included.
        max_context: tokens a session may hold.
        prefer_reuse: see `Runner`.
        checkpoint_bytes: what recurrent checkpoints of a session may hold; 0 keeps none.
        checkpoint_every: tokens between two of them.
    """
    target = ScriptedModel() if model is None else model
    drafts: Drafter = NoDrafter() if drafter is None else drafter

    def new_session() -> Session:
        return Session(
            lambda: target.make_caches(max_context, 0),
            max_context,
            make_drafter_state=lambda: drafts.new_state(max_context),
            checkpoints=Checkpoints(checkpoint_bytes, checkpoint_every),
        )

    pool = SessionPool(new_session, slots - 1)
    return Runner(target, pool, drafts, prefix_reuse=True, prefer_reuse=prefer_reuse)

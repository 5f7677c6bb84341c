"""The decision about prefix reuse: pure, and it always says why."""

from collections.abc import Sequence

from turbospark.protocols import Reuse
from turbospark.sessions.fed_ids import FedIds


def decide_reuse(
    fed: FedIds, prompt: Sequence[int], *, position: int, max_rewind: int, enabled: bool = True
) -> Reuse:
    """How many of a prompt's leading tokens the live state can stand for.

    Args:
        fed: the record of the live state.
        prompt: the ids to run.
        position: tokens the caches hold.
        max_rewind: how many of them the caches can take back.
        enabled: whether reuse is wanted at all.

    Returns:
        the length, and the reason why it is not more. Nothing has moved.
    """
    if not enabled:
        return Reuse(0, "prefix reuse is off")
    if fed.tainted:
        return Reuse(0, "an earlier forward pass failed, so the caches are not trusted")
    if not len(fed):
        return Reuse(0, "nothing was fed before")
    keep = fed.common_prefix(prompt)
    if keep == 0:
        if len(prompt) == 1:
            return Reuse(0, "a prompt of one token has nothing before its last token")
        return Reuse(0, "the prompt differs from what was fed at token 0")
    if keep > position:
        return Reuse(0, f"the caches hold {position} tokens where the record has {len(fed)}")
    back = position - keep
    if back > max_rewind:
        return Reuse(
            0, f"going back {back} tokens is more than the {max_rewind} that the caches can"
        )
    if back == 0:
        return Reuse(keep, "the prompt continues what was fed")
    if keep == len(prompt) - 1:
        return Reuse(keep, f"all of the prompt but its last token was fed; {back} taken back")
    return Reuse(keep, f"the prompt parts from what was fed at token {keep}; {back} taken back")

"""What the runner can do with a model, and why not more, in the words of its refusals."""

from collections.abc import Mapping, Sequence
from typing import Any

from turbospark.protocols import CausalModel
from turbospark.runner.refusals import Traits, refusal
from turbospark.settings import UNBUILT
from turbospark.speculation.ngram import NgramDrafter

Ability = tuple[bool, str]
"""Whether something works, and how, or why not."""

_DRAFTERS = {
    "mtp": "draft='auto' or 'mtp' takes the checkpoint's own prediction head",
    "dflash": "draft=PATH takes the checkpoint of a block drafter",
    "ngram": "draft='ngram' looks tokens up in the text",
    "draft model": "draft=PATH takes a smaller model with the same tokenizer",
}


def abilities(
    model: CausalModel,
    caches: Sequence[Any],
    drafter_refusals: Mapping[str, str],
    *,
    has_experts: bool,
    drafters_beside: Mapping[str, str] | None = None,
) -> dict[str, Ability]:
    """Everything that depends on a model and its caches, by its name.

    Args:
        model: weights are not needed.
        caches: as `make_caches` gives them for a session.
        drafter_refusals: drafters to why the model or its checkpoint has none; others and empty
            reasons are left to the runner.
        has_experts: whether it has routed experts.
        drafters_beside: drafters to where one lies; "mtp" and "dflash" of a family that has them.
    """
    traits = Traits.of(model, caches, NgramDrafter())
    experts = UNBUILT["residency"].reason if has_experts else "it has no routed experts"
    found = {
        "reuse": _ability(refusal("try_reuse_prefix", traits), "a prompt feeds only what is new"),
        "rewind": _rewind(traits),
        "chunks": _ability(refusal("prefill_chunk", traits), "a pass takes many prompt tokens"),
    }
    beside = drafters_beside or {}
    for name, words in _DRAFTERS.items():
        lacking = drafter_refusals.get(name)
        if name in beside and (lacking or name != "mtp"):  # a head of its own is taken first
            lacking, words = None, f"draft={beside[name]!r} takes the one that lies there"
        found[name] = _ability(lacking or refusal("draft", traits), words)
    found["streaming"] = _ability(experts, "")
    found["KV bits"] = _ability(UNBUILT["kv_bits"].reason, "")
    return found


def _ability(refused: str | None, words: str) -> Ability:
    return not refused, refused or words


def _rewind(traits: Traits) -> Ability:
    words = "by any number of tokens"
    if traits.rewind_bound is not None:
        words += f" until a window has wrapped, then by {traits.rewind_bound} (ring_slack)"
    if traits.recurrent:
        words = "to the checkpoints that recurrent layers keep on the way (checkpoint_every)"
    return _ability(refusal("launch", traits), words)

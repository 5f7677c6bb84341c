"""What a runner refuses, and why: one table over properties of model, caches and drafter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turbospark.caches.rollback import rewind_bound
from turbospark.protocols import CausalModel, Drafter


@dataclass(frozen=True, slots=True)
class Traits:
    """What the refusals depend on.

    Attributes:
        takes_chunks: whether the model serves passes of many prompt tokens.
        recurrent: whether it has layers that fold all tokens into one state.
        records_rows: whether these can be cut short after a pass.
        rewind_bound: rows of a pass that every cache can take back; None is any number.
        draft_off: why nothing is drafted; an empty string where a drafter is open.
        block_passes: whether the drafter proposes whole blocks rather than steps.
        max_block: tokens that it proposes at most.
        reuse: whether anything fed may be kept from one prompt to the next.
        prompt_vision: whether image rows are set for the next prompt.
    """

    takes_chunks: bool = True
    recurrent: bool = False
    records_rows: bool = True
    rewind_bound: int | None = None
    draft_off: str = ""
    block_passes: bool = False
    max_block: int = 8
    reuse: bool = True
    prompt_vision: bool = False

    @staticmethod
    def of(model: CausalModel, caches: Sequence[Any], drafter: Drafter) -> "Traits":
        """Those of a model with its caches and a drafter."""
        off = getattr(drafter, "reason", "no drafter is open") if drafter.name == "off" else ""
        return Traits(
            takes_chunks=getattr(model, "takes_chunks", True),
            recurrent=any(cache.recurrent for cache in caches),
            records_rows=getattr(model, "records_rows", True),
            rewind_bound=rewind_bound(caches),
            draft_off=off,
            block_passes=drafter.block_passes,
            max_block=drafter.max_block,
        )


Rule = Callable[[Traits], str | None]


def _no_chunks(traits: Traits) -> str | None:
    return None if traits.takes_chunks else "this model takes prompt tokens one by one"


def _no_drafter(traits: Traits) -> str | None:
    return traits.draft_off or None


def _no_steps(traits: Traits) -> str | None:
    return "the drafter proposes whole blocks" if traits.block_passes else None


def _no_blocks(traits: Traits) -> str | None:
    return None if traits.block_passes else "the drafter proposes token by token"


def _no_rows(traits: Traits) -> str | None:
    if not traits.recurrent or traits.records_rows:
        return None
    return "its recurrent layers cannot be cut short after a pass"


def _no_slack(traits: Traits) -> str | None:
    bound, rows = traits.rewind_bound, traits.max_block + 1
    if bound is None or bound >= rows:
        return None
    return (
        f"its sliding windows can take back {bound} tokens where a round feeds up to {rows}; draft "
        "shorter blocks, or load with a larger ring_slack"
    )


def _no_step_back(traits: Traits) -> str | None:
    no_slack = "its sliding windows cannot take back a token; load with a ring_slack of 1 or more"
    return no_slack if traits.rewind_bound == 0 else None


def _no_reuse(traits: Traits) -> str | None:
    return None if traits.reuse else "prefix reuse is off"


def _vision(traits: Traits) -> str | None:
    images = "the prompt has images, which token ids do not tell apart"
    return images if traits.prompt_vision else None


TABLE: Mapping[str, tuple[Rule, ...]] = {
    "try_reuse_prefix": (_no_reuse, _vision),
    "prefill_chunk": (_no_chunks,),
    "draft": (_no_drafter, _no_rows, _no_slack),
    "draft_step": (_no_drafter, _no_rows, _no_slack, _no_steps),
    "draft_block": (_no_drafter, _no_rows, _no_slack, _no_blocks),
    "prime_drafter": (_no_drafter,),
    "rewind_drafter": (_no_drafter,),
    "launch": (_no_step_back,),
    "rollback_retaining": (_no_rows,),
}
"""Method to what may forbid it, the weightiest first. What is not here is never refused."""


def refusal(method: str, traits: Traits) -> str | None:
    """Why `method` is refused; None where it is served."""
    return next((reason for rule in TABLE.get(method, ()) if (reason := rule(traits))), None)

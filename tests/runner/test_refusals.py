"""Every refusal comes from one table: a trait moves its own refusals and no other."""

from dataclasses import fields, replace
from typing import Any

import pytest

from turbospark.caches.kv import KVCache
from turbospark.caches.recurrent import RecurrentCache
from turbospark.caches.ring import RingCache
from turbospark.errors import ProducerError
from turbospark.runner.refusals import TABLE, Traits, refusal
from turbospark.speculation.off import NoDrafter
from turbospark.testing import ScriptedDrafter, ScriptedModel, scripted_runner

SERVED = Traits()
DRAFTS = {"draft", "draft_step", "draft_block"}
MOVES: list[tuple[dict[str, Any], set[str]]] = [
    ({"takes_chunks": False}, {"prefill_chunk"}),
    ({"recurrent": True}, set()),
    ({"recurrent": True, "records_rows": False}, {*DRAFTS, "rollback_retaining"}),
    ({"records_rows": False}, set()),
    ({"rewind_bound": 9}, set()),
    ({"rewind_bound": 8}, DRAFTS),
    ({"rewind_bound": 8, "max_block": 7}, set()),
    ({"rewind_bound": 0}, {*DRAFTS, "launch"}),
    ({"max_block": 99}, set()),
    ({"draft_off": "because"}, {*DRAFTS, "prime_drafter", "rewind_drafter"}),
    ({"block_passes": True}, {"draft_step"}),
    ({"reuse": False}, {"try_reuse_prefix"}),
    ({"prompt_vision": True}, {"try_reuse_prefix"}),
]


def refused(traits: Traits) -> set[str]:
    return {method for method in TABLE if refusal(method, traits)}


@pytest.mark.parametrize(("change", "methods"), MOVES, ids=[str(change) for change, _ in MOVES])
def test_a_trait_moves_exactly_its_refusals(change: dict[str, Any], methods: set[str]) -> None:
    steps = {"draft_block"}  # of a drafter that proposes token by token
    blocks = {"draft_step"}
    standing = blocks if change.get("block_passes") else steps
    assert refused(SERVED) == steps
    assert refused(replace(SERVED, **change)) == methods | standing


def test_every_trait_is_flipped_above() -> None:
    assert {field.name for field in fields(Traits)} == {
        name for change, _ in MOVES for name in change
    }


def test_every_reason_names_what_is_in_the_way() -> None:
    assert refusal("draft", replace(SERVED, draft_off="because")) == "because"
    assert "3 tokens where a round feeds up to 9" in str(
        refusal("draft", replace(SERVED, rewind_bound=3))
    )
    assert refusal("reset", replace(SERVED, draft_off="because")) is None


def test_traits_come_from_model_caches_and_drafter() -> None:
    model = ScriptedModel()
    rings = [KVCache(2, 4, 99), RingCache(2, 4, 99, 9, 5), RingCache(2, 4, 99, 9, 4)]
    traits = Traits.of(model, rings, NoDrafter("nobody asked"))
    assert traits == Traits(
        rewind_bound=4, draft_off="nobody asked", block_passes=True, max_block=0
    )
    unwrapped = [KVCache(2, 4, 20), RingCache(2, 4, 20, 16, 4)]
    drafter = ScriptedDrafter(model.logits_of, max_block=5)
    assert Traits.of(model, unwrapped, drafter) == Traits(max_block=5)
    model.takes_chunks = model.records_rows = False
    hybrid = [KVCache(2, 4, 20), RecurrentCache(lambda: (), 20)]
    assert Traits.of(model, hybrid, drafter) == Traits(
        max_block=5, recurrent=True, takes_chunks=False, records_rows=False
    )


def test_a_model_without_chunks_says_so_before_it_is_asked_and_after() -> None:
    model = ScriptedModel()
    model.takes_chunks = False
    runner = scripted_runner(model)
    assert not runner.supports_chunked_prefill()
    with pytest.raises(ProducerError, match="takes prompt tokens one by one"):
        runner.prefill_chunk([1, 2], 0)
    assert runner.session.position == 0
    assert scripted_runner().supports_chunked_prefill()


def test_without_a_drafter_the_reason_is_the_drafters_own() -> None:
    runner = scripted_runner(drafter=NoDrafter("it was not asked for"))
    assert runner.draft_off_reason() == "it was not asked for"
    runner.prefill_chunk([1, 2], 0)
    for call in (
        lambda: runner.draft_step(3, 1),
        lambda: runner.draft_block(3, 2, 1),
        lambda: runner.prime_drafter(3, 1),
        lambda: runner.rewind_drafter(1),
    ):
        with pytest.raises(ProducerError, match="it was not asked for"):
            call()


def test_steps_and_blocks_are_told_apart() -> None:
    model = ScriptedModel()
    for block_passes, call, reason in (
        (True, "draft_step", "whole blocks"),
        (False, "draft_block", "token by token"),
    ):
        drafter = ScriptedDrafter(model.logits_of, block_passes=block_passes)
        runner = scripted_runner(model, drafter)
        assert runner.drafts_block_passes() == block_passes
        assert runner.draft_off_reason() is None
        runner.prefill_chunk([1, 2], 0)
        with pytest.raises(ProducerError, match=reason):
            runner.draft_step(3, 1) if call == "draft_step" else runner.draft_block(3, 2, 1)


def test_recurrent_layers_that_cannot_be_cut_short_turn_drafting_off() -> None:
    model = ScriptedModel(recurrent=1)
    model.records_rows = False
    runner = scripted_runner(model, ScriptedDrafter(model.logits_of))
    assert not runner.supports_retaining_rollback()
    assert "cannot be cut short" in str(runner.draft_off_reason())
    assert scripted_runner(ScriptedModel(recurrent=1)).supports_retaining_rollback()


def test_a_verify_wider_than_the_slack_is_refused_before_anything_moves() -> None:
    runner = scripted_runner(ScriptedModel(reach=3))
    runner.prefill_chunk([1, 2, 3, 4, 5], 0)
    with pytest.raises(ProducerError, match=r"cannot verify 4 tokens: .* take back 3"):
        runner.verify([6, 7, 8, 9], 5)
    assert runner.session.position == 5
    assert not runner.session.fed_ids.tainted
    point = runner.checkpoint()
    runner.verify([6, 7, 8], 5)
    runner.rollback(point)
    assert runner.session.position == 5

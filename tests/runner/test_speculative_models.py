"""Generations over a real tiny model with real drafters: the text is the plain one."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from golden.drafter_fixtures import drafter_module, run_trunk, trunk_of
from golden.drafter_recipes import VOCAB
from golden.fixtures import kernel_sets

from turbospark.protocols import ForwardOutput
from turbospark.runner.generation import admit, collect, run
from turbospark.runner.options import read_options
from turbospark.runner.results import GeneratedText
from turbospark.runner.runner import Runner
from turbospark.sessions.checkpoints import Checkpoints
from turbospark.sessions.pool import SessionPool
from turbospark.sessions.session import Session
from turbospark.speculation.dflash import DFlashDrafter
from turbospark.speculation.model import ModelDrafter
from turbospark.speculation.mtp import MTPDrafter
from turbospark.testing import ByteTokenizer

CONTEXT = 96
PROMPT = np.random.default_rng(3).integers(0, VOCAB, 21).tolist()
KINDS = ["mtp", "streams", "dflash2", "dflash1", "itself"]
TRUNKS = {"streams": "qwen4_exp_mtp"}
KERNELS = kernel_sets()


def trunk_name(kind: str | None) -> str:
    """The fixture of the model that a drafter of some kind drafts for."""
    return TRUNKS.get(kind or "", "qwen3_5_mtp")


@cache
def drafter_of(kind: str, kernels: str = "reference") -> Any:
    target = KERNELS[kernels]
    if kind in ("mtp", "streams"):
        return MTPDrafter(drafter_module(trunk_name(kind), target))
    if kind == "itself":
        return ModelDrafter(trunk_of("qwen3_5_mtp", target), VOCAB)
    return DFlashDrafter(drafter_module(kind, target))


def make(
    kind: str, *, context: int = CONTEXT, kernels: str = "reference", drafts: bool = True
) -> Runner:
    model = trunk_of(trunk_name(kind), KERNELS[kernels])
    drafter = drafter_of(kind, kernels) if drafts else None

    def new_session() -> Session:
        state = None if drafter is None else lambda: drafter.new_state(context)
        return Session(
            lambda: model.make_caches(context, 16),
            context,
            make_drafter_state=state,
            checkpoints=Checkpoints(1 << 20, 8),
        )

    return Runner(model, SessionPool(new_session, 1), drafter, prefix_reuse=True)


def text(runner: Runner, prompt: list[int] = PROMPT, **given: Any) -> GeneratedText:
    if runner.drafter.max_block == 0:
        given.pop("draft_block", None)
    options = read_options({"max_tokens": 24, **given})
    generation = admit(runner, ByteTokenizer(), prompt, options, stop_ids=frozenset(), chunk=8)
    return collect(run(runner, generation))


def fed(runner: Runner) -> list[int]:
    return runner.session.fed_ids.ids


def plain(kind: str, **how: Any) -> list[int]:
    return _plain(kind if kind in TRUNKS else "mtp", **how)


@cache
def _plain(
    kind: str, context: int = CONTEXT, kernels: str = "reference", **given: Any
) -> list[int]:
    runner = make(kind, context=context, kernels=kernels, drafts=False)
    text(runner, **given)
    return fed(runner)


def opinion(drafter: Any, state: Any, ids: list[int]) -> np.ndarray:
    state = state.fork()
    if drafter.block_passes:
        drafter.prime(state, ids, 9)
        return np.array(drafter.module.propose(9, state.caches)[1])
    return np.array(drafter.step(state, 9, len(ids) - 1))


def assert_drafter_follows(runner: Runner) -> None:
    """Its next draft is that of one that was given all that was fed in one pass."""
    drafter, session, ids = runner.drafter, runner.session, fed(runner)
    output = run_trunk(runner.model, ids, drafter.taps)
    fresh = drafter.new_state(CONTEXT)
    drafter.observe(fresh, ids, 0, ForwardOutput(None, output.taps, output.hidden))
    np.testing.assert_allclose(
        opinion(drafter, session.drafter_state, ids), opinion(drafter, fresh, ids), atol=2e-3
    )


@pytest.mark.parametrize("block", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_plain_one(kind, block):
    runner = make(kind)
    result = text(runner, draft_block=min(block, runner.drafter.max_block))
    assert fed(runner) == plain(kind)
    assert result.drafted > 0
    assert_drafter_follows(runner)
    if kind == "itself":
        assert result.accepted == result.drafted


@pytest.mark.parametrize("kernels", sorted(KERNELS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_plain_one_with_every_kernel(kind, kernels):
    runner = make(kind, kernels=kernels)
    text(runner, draft_block=3)
    assert fed(runner) == plain(kind, kernels=kernels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_a_short_budget_ends_as_the_plain_one(kind, budget):
    runner = make(kind)
    text(runner, max_tokens=budget, draft_block=4)
    assert fed(runner) == plain(kind, max_tokens=budget)
    assert_drafter_follows(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_the_contexts_end_is_the_plain_one(kind):
    runner = make(kind, context=33)
    text(runner, max_tokens=12, draft_block=4)
    assert fed(runner) == plain(kind, context=33, max_tokens=12)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_leaves_a_drafter_that_follows(kind):
    given = {"temperature": 0.9, "seed": 4, "top_k": 40}
    runner = make(kind)
    text(runner, draft_block=3, **given)
    assert_drafter_follows(runner)
    if runner.drafter.block_passes:  # every token is the target's own draw
        assert fed(runner) == plain(kind, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_and_one_that_parts_earlier_are_the_plain_ones(kind):
    runner, bare, said = make(kind), make(kind, drafts=False), plain(kind)
    for prompt in (PROMPT, [*said, 7, 8, 9], [*said[:30], 5, 6], [*said[:12], 15]):
        results = [text(each, prompt, draft_block=3, max_tokens=9) for each in (runner, bare)]
        assert fed(runner) == fed(bare)
        assert results[0].drafted > 0
        assert_drafter_follows(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_a_suspended_generation_leaves_a_drafter_that_follows(kind):
    for stop in (1, 2, 4, 7):
        runner = make(kind)
        options = read_options({"max_tokens": 24, "draft_block": 3})
        steps = run(
            runner,
            admit(runner, ByteTokenizer(), PROMPT, options, stop_ids=frozenset(), chunk=8),
        )
        given = [next(steps) for _ in range(stop)]
        steps.close()
        assert fed(runner) == plain(kind)[: len(PROMPT) + stop - 1]
        assert len(given) == stop
        assert_drafter_follows(runner)

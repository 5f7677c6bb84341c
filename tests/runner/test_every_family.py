"""Conversations over a tiny model of every family: each says what it says alone."""

from typing import Any

import numpy as np
import pytest
from golden.fixtures import assert_same_logits
from golden.tiny import TINY, tiny_model
from runner.turns import Turn, best, turn

from turbospark.runner.runner import Runner
from turbospark.sessions.checkpoints import Checkpoints
from turbospark.sessions.pool import SessionPool
from turbospark.sessions.session import Session

CONTEXT = 64
A, B, MORE = [3, *range(20, 39)], [5, *range(50, 61)], [7, 11, 13]


@pytest.fixture(
    scope="module", params=[kind for kind in sorted(TINY) if not kind.endswith("_text")]
)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def open_runner(model: Any, slots: int) -> Runner:
    def new_session() -> Session:
        return Session(
            lambda: model.make_caches(CONTEXT, 5), CONTEXT, checkpoints=Checkpoints(1 << 20, 8)
        )

    return Runner(model, SessionPool(new_session, slots - 1), prefix_reuse=True)


def goes_on(runner: Runner, before: Turn) -> Turn:
    done = turn(runner, [*before.ids, best(before.row), *MORE], 5, chunk=3)
    assert done.reuse.tokens == len(before.ids)
    return done


def assert_alike(model: Any, one: Turn, other: Turn) -> None:
    assert one.ids == other.ids
    assert_same_logits(model, np.array([one.row]), np.array([other.row]))


def test_swapped_out_and_in_again_it_says_what_it_says_alone(model: Any) -> None:
    alone = open_runner(model, 1)
    wanted = goes_on(alone, turn(alone, A, 6))
    shared = open_runner(model, 2)
    first = turn(shared, A, 6)
    turn(shared, B, 4)
    assert shared.session.fed_ids.ids[0] == B[0]
    assert_alike(model, goes_on(shared, first), wanted)


def test_both_branches_of_a_fork_say_what_they_say_alone(model: Any) -> None:
    alone = open_runner(model, 1)
    wanted = goes_on(alone, turn(alone, A, 6))
    runner = open_runner(model, 1)
    first = turn(runner, A, 6)
    fork = Runner(model, runner.session.fork(), prefix_reuse=True)
    elsewhere = turn(fork, [*first.ids, 9, 9, 2], 4)
    assert_alike(model, goes_on(runner, first), wanted)
    cold = open_runner(model, 1)
    turn(cold, first.ids, 0)
    other = turn(cold, [*first.ids, 9, 9, 2], 4)
    assert elsewhere.ids == other.ids

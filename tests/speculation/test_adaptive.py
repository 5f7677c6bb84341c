"""The controller of block sizes: what it wins, and how little it may lose."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from turbospark.errors import OptionError
from turbospark.speculation.adaptive import (
    CREDIT,
    FLOOR,
    MOST_LOST_PROBES,
    AdaptiveBlock,
    FixedBlock,
)
from turbospark.speculation.costs import AcceptanceRates, RoundCosts

Rate = Callable[[int], float]
Cost = Callable[[int, int], float]


@dataclass
class Simulation:
    """A generation whose times and acceptance are given, not measured.

    Attributes:
        rate: the chance that a proposal stays, by tokens given so far.
        cost: seconds of a pass, by proposals and tokens given so far.
        blocks: what the controller chose, pass by pass.
        places: tokens given before each pass.
        slowest: the least speed, against plain decoding, that the whole ever had.
    """

    rate: Rate
    cost: Cost
    policy: Any = field(default_factory=lambda: AdaptiveBlock(4))
    blocks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    given: int = 0
    spent: float = 0.0
    plain: float = 0.0
    slowest: float = 9.0

    def run(self, tokens: int, seed: int = 0) -> "Simulation":
        chance = random.Random(seed)
        while self.given < tokens:
            self.step(chance)
        return self

    def step(self, chance: random.Random) -> None:
        block, accepted, at = self.policy.choose(), 0, self.given
        while accepted < block and chance.random() < self.rate(at):
            accepted += 1
        seconds = self.cost(block, at)
        self.blocks.append(block)
        self.places.append(at)
        self.given += accepted + 1
        self.spent += seconds
        self.plain += (accepted + 1) * self.cost(0, at)
        if block:
            self.policy.note_round(block, accepted, seconds)
        else:
            self.policy.note_plain(seconds)
        # CREDIT plain steps may be owed, and what a switch of costs hides from the medians.
        credit = CREDIT * self.cost(0, at)
        self.slowest = min(self.slowest, (self.plain + credit) / self.spent)

    @property
    def speed(self) -> float:
        """Against plain decoding."""
        return self.plain / self.spent

    @property
    def last(self) -> Counter[int]:
        """Blocks of the last quarter."""
        return Counter(self.blocks[-len(self.blocks) // 4 :])


def linear(slope: float) -> Cost:
    return lambda block, _: 1.0 + slope * block


def always(rate: float) -> Rate:
    return lambda _: rate


@pytest.mark.parametrize("slope", [0.05, 0.15, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("most", [1, 4, 8])
def test_it_is_never_slower_than_the_floor(rate: float, slope: float, most: int) -> None:
    simulation = Simulation(always(rate), linear(slope), AdaptiveBlock(most)).run(2000)
    assert simulation.slowest >= FLOOR
    assert simulation.speed >= FLOOR


@pytest.mark.parametrize(
    ("rate", "slope", "blocks", "speed"),
    [
        (0.95, 0.1, {4}, 3.0),
        (0.9, 0.3, {2, 3, 4}, 1.6),
        (0.6, 0.3, {1, 2}, 1.1),
        (0.2, 0.3, {0}, FLOOR),
        (0.0, 0.05, {0}, FLOOR),
    ],
)
def test_it_finds_the_block_that_pays(
    rate: float, slope: float, blocks: set[int], speed: float
) -> None:
    simulation = Simulation(always(rate), linear(slope)).run(3000)
    assert simulation.last.most_common(1)[0][0] in blocks
    assert simulation.speed >= speed


def test_costs_that_jump_with_the_rows_keep_it_below_the_jump() -> None:
    simulation = Simulation(always(0.9), lambda block, _: 1.0 if block < 2 else 9.0).run(3000)
    assert simulation.last.most_common(1)[0][0] == 1
    assert simulation.speed > 1.7


def test_a_drafter_that_loses_is_probed_ever_less_and_in_the_end_no_more() -> None:
    simulation = Simulation(always(0.0), linear(0.3)).run(20_000)
    rounds = [at for at, block in zip(simulation.places, simulation.blocks, strict=True) if block]
    gaps = [b - a for a, b in pairwise(rounds) if b - a > 20]
    assert len(gaps) == MOST_LOST_PROBES
    assert all(b > 1.5 * a for a, b in pairwise(gaps))
    assert max(rounds) < 5000
    assert "slower than plain" in simulation.policy.off_reason


def test_a_new_generation_allows_one_more_probe() -> None:
    simulation = Simulation(always(0.0), linear(0.3)).run(20_000)
    before = len([block for block in simulation.blocks if block])
    simulation.policy.begin()
    simulation.run(40_000)
    after = len([block for block in simulation.blocks if block])
    assert 0 < after - before <= 3


def test_a_drafter_that_recovers_is_found_by_a_probe() -> None:
    simulation = Simulation(lambda at: 0.95 if at > 400 else 0.0, linear(0.2)).run(4000)
    assert simulation.slowest >= FLOOR
    assert simulation.last.most_common(1)[0][0] >= 3
    assert simulation.policy.off_reason is None


def test_a_drafter_that_gets_worse_is_parked_soon() -> None:
    simulation = Simulation(lambda at: 0.95 if at < 1000 else 0.0, linear(0.2)).run(1500)
    losing = [
        block for at, block in zip(simulation.places, simulation.blocks, strict=True) if at >= 1000
    ]
    assert len([block for block in losing if block]) < 40
    assert simulation.policy.off_reason is not None


def test_rounds_that_grow_dear_with_the_context_are_given_up() -> None:
    def cost(block: int, at: int) -> float:
        return 1.0 + at / 4000 + (block * at / 2000 if block else 0.0)

    simulation = Simulation(always(0.6), cost).run(6000)
    assert set(simulation.last) <= {0, 1, 2}
    assert simulation.last[0] > 0.9 * sum(simulation.last.values())
    assert simulation.speed > 1.0


def test_one_slow_pass_decides_nothing() -> None:
    hiccups = iter([*[1.0] * 30, 80.0, *[1.0] * 9999])
    simulation = Simulation(always(0.9), lambda block, _: (1 + 0.1 * block) * next(hiccups))
    chance = random.Random(1)
    while len(simulation.blocks) < 300:
        block = simulation.policy.choose()
        accepted = 0
        while accepted < block and chance.random() < 0.9:
            accepted += 1
        seconds = simulation.cost(block, 0)
        simulation.blocks.append(block)
        if block:
            simulation.policy.note_round(block, accepted, seconds)
        else:
            simulation.policy.note_plain(seconds)
    assert simulation.blocks.count(0) < 15


def test_the_same_outcomes_and_times_give_the_same_choices() -> None:
    first = Simulation(always(0.5), linear(0.2)).run(800, seed=5)
    second = Simulation(always(0.5), linear(0.2)).run(800, seed=5)
    assert first.blocks == second.blocks


def test_a_plain_step_is_timed_anew_while_it_drafts() -> None:
    simulation = Simulation(always(0.95), linear(0.1)).run(3000)
    plain = [index for index, block in enumerate(simulation.blocks) if block == 0]
    assert all(b - a <= 66 for a, b in pairwise(plain))
    assert len(simulation.blocks) - plain[-1] <= 66


def test_before_any_time_is_known_it_decodes_plainly() -> None:
    policy = AdaptiveBlock(4)
    chosen: list[int] = []
    for _ in range(3):
        chosen.append(policy.choose())
        policy.note_plain(1.0)
    assert chosen == [0, 0, 2]


def test_lookup_that_finds_less_than_wanted_or_nothing_is_taken_as_it_is() -> None:
    policy = AdaptiveBlock(8)
    for index in range(200):
        wanted = policy.choose()
        if wanted and index % 3 == 0:
            policy.note_round(min(wanted, 1 + index % 5), 1, 1.1)
        else:
            policy.note_plain(1.0)
    assert policy.off_reason is None
    assert policy.choose() > 0


def test_a_fixed_block_is_what_it_says() -> None:
    policy = FixedBlock(3)
    policy.begin()
    policy.note_plain(1.0)
    policy.note_round(3, 0, 99.0)
    assert (policy.choose(), policy.off_reason) == (3, None)
    with pytest.raises(OptionError, match="draft_block=0"):
        FixedBlock(0)
    with pytest.raises(OptionError, match="0 proposals"):
        AdaptiveBlock(0)


def test_costs_leave_the_first_time_out_and_take_the_middle_of_the_rest() -> None:
    costs = RoundCosts()
    costs.note(0, 50.0)
    assert not costs.known(0)
    for seconds in (2.0, 9.0, 1.0):
        costs.note(0, seconds)
    assert costs.of(0) == 2.0


def test_a_clock_that_stands_still_is_borne() -> None:
    policy = AdaptiveBlock(2)
    for _ in range(50):
        block = policy.choose()
        if block:
            policy.note_round(block, block, 0.0)
        else:
            policy.note_plain(0.0)
    assert policy.choose() in (0, 1, 2)


def test_costs_between_and_beyond_what_was_timed_lie_on_lines() -> None:
    costs = RoundCosts()
    for block, seconds in ((0, 1.0), (2, 2.0), (4, 6.0)):
        costs.note(block, 99.0)
        costs.note(block, seconds)
    assert [costs.of(block) for block in (1, 3, 6)] == [1.5, 4.0, 8.5]


def test_acceptance_counts_a_place_only_where_all_before_it_stayed() -> None:
    rates = AcceptanceRates(3)
    for _ in range(300):
        rates.note(3, 1)
    first, second = rates.tokens(1) - 1, rates.tokens(2) - rates.tokens(1)
    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(0.0, abs=0.01)
    # The third place was never looked at and keeps what was assumed of it.
    assert rates.tokens(3) - rates.tokens(2) == pytest.approx(0.75 * second)

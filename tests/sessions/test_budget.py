"""Idle conversations within a number of bytes."""

import gc

from turbospark.sessions.budget import ByteBudget, default_limit


class Holder:
    def __init__(self, nbytes: int, busy: bool = False) -> None:
        self.nbytes = nbytes
        self.busy = busy

    def give_back(self) -> bool:
        if not self.busy:
            self.nbytes = 0
        return not self.busy


def used(budget: ByteBudget, *holders: Holder) -> list[int]:
    return [budget.use(holder) for holder in holders]


def test_the_one_in_use_may_be_of_any_size() -> None:
    budget, large = ByteBudget(10), Holder(1000)
    assert used(budget, large, large) == [0, 0]
    assert large.nbytes == 1000


def test_the_least_recently_used_give_way_by_bytes_and_not_by_count() -> None:
    budget = ByteBudget(100)
    small = [Holder(9) for _ in range(11)]
    assert sum(used(budget, *small)) == 0
    a, b, c = Holder(60), Holder(50), Holder(7)
    assert used(budget, a, b) == [0, 7]
    assert [holder.nbytes for holder in small] == [0] * 7 + [9] * 4
    used(budget, a)
    assert used(budget, c) == [5]
    assert (a.nbytes, b.nbytes, c.nbytes) == (60, 0, 7)
    assert budget.nbytes == 67


def test_one_with_a_reply_in_progress_is_passed_over() -> None:
    budget = ByteBudget(70)
    busy, idle, last = Holder(60, busy=True), Holder(50), Holder(1)
    assert used(budget, busy, idle, last) == [0, 0, 1]
    assert (busy.nbytes, idle.nbytes) == (60, 0)


def test_a_budget_of_zero_keeps_nothing_idle() -> None:
    budget, one, other = ByteBudget(0), Holder(5), Holder(6)
    assert used(budget, one, other, one) == [0, 1, 1]
    assert (one.nbytes, other.nbytes) == (0, 0)


def test_idle_bytes_of_the_one_in_use_count_too() -> None:
    budget, pool, other = ByteBudget(100), Holder(70), Holder(40)
    used(budget, pool, other)
    assert budget.use(pool) == 0
    assert budget.use(pool, held=61) == 1
    assert (pool.nbytes, other.nbytes) == (70, 0)


def test_what_is_forgotten_or_dropped_counts_for_nothing() -> None:
    budget, kept, closed = ByteBudget(12), Holder(6), Holder(6)
    dropped = Holder(6)
    used(budget, kept, closed, dropped)
    del dropped
    gc.collect()
    budget.forget(closed)
    assert budget.nbytes == 6
    assert budget.use(Holder(1)) == 0


def test_the_limit_is_two_gibibytes_or_a_quarter_of_what_is_free() -> None:
    assert default_limit(None) == 2 << 30
    assert default_limit(64 << 30) == 2 << 30
    assert default_limit(4 << 30) == 1 << 30

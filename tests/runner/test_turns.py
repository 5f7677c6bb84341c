"""The lock that conversations share: in order, re-entrant, and left by who is interrupted."""

import threading
import time
from typing import Any

import pytest

from turbospark.runner.turns import TurnLock


def started(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_one_that_asks_again_and_again_lets_the_others_in() -> None:
    lock, done, rounds = TurnLock(), threading.Event(), 0

    def greedy() -> None:
        nonlocal rounds
        while not done.is_set():
            with lock:
                rounds += 1
                time.sleep(0.001)

    thread = started(greedy)
    while not rounds:
        time.sleep(0.001)
    before = rounds
    for _ in range(20):
        with lock:
            pass
    done.set()
    thread.join()
    assert rounds - before <= 23


def test_turns_come_in_the_order_they_were_asked_for() -> None:
    lock, order, threads = TurnLock(), [], []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(5):
            threads.append(started(lambda number=number: take(number)))
            while len(lock._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(5))


def test_its_holder_may_take_it_again() -> None:
    lock = TurnLock()
    with lock, lock:
        with lock:
            pass
        other = started(lambda: lock.__enter__())
        time.sleep(0.01)
        assert other.is_alive()
    other.join()


def test_nothing_is_held_by_two_at_once() -> None:
    lock, inside, most, total = TurnLock(), 0, 0, 0

    def work() -> None:
        nonlocal inside, most, total
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
                total += 1
                inside -= 1

    threads = [started(work) for _ in range(6)]
    for thread in threads:
        thread.join()
    assert (most, total) == (1, 1200)


@pytest.mark.parametrize("handed", [False, True])
def test_who_is_interrupted_while_waiting_leaves_the_queue(handed: bool) -> None:
    lock = TurnLock()
    gate = threading.Lock()
    lock.__enter__()
    lock._waiting.append(gate)
    gate.acquire()
    if handed:
        lock.__exit__(None, None, None)
        assert not gate.locked()
        lock._give_up(gate)
    else:
        lock._give_up(gate)
        lock.__exit__(None, None, None)
    with lock:
        pass
    assert lock._owner is None

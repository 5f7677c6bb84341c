"""The thread pool under several Python threads, at rest, and across a fork."""

import os
import signal
import threading
import time
import warnings

import mlx.core as mx
import pytest
from kernels.matrices import rows

from turbospark.caches.kv import KVCache
from turbospark.kernels.host.target import HostKernels
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy


def projection(N, threads, seed):
    kernels = HostKernels(KernelPolicy(activations="exact", threads=threads))
    return kernels.normed_projections(None, [rows(N, 160, seed=seed)], [None])


def test_calls_from_several_threads_do_not_disturb_each_other():
    jobs = [(projection(257, 2, 1), rows(1, 160, seed=2), Phase.DECODE)]
    jobs += [(projection(131, 3, 3), rows(21, 160, seed=4), Phase.PREFILL)]
    jobs += [(projection(67, 2, 5), rows(5, 160, seed=6), Phase.DECODE)]
    expected = [run(x, phase)[0] for run, x, phase in jobs]
    wrong = []

    def work(index):
        run, x, phase = jobs[index]
        results = [run(x, phase)[0] for _ in range(60)]
        wrong.extend(index for got in results if not mx.array_equal(got, expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_step_of_a_fused_call_waits_for_the_one_before():
    def gated(threads):
        kernels = HostKernels(KernelPolicy(activations="exact", threads=threads))
        weights = [rows(1040, 160, seed=7), rows(1040, 160, seed=8), rows(160, 1040, seed=9)]
        norm = Norm(None, 1e-5)
        return kernels.gated_mlp(norm, *weights, [None] * 3, "silu", norm, True)

    alone, crowd = gated(1), gated(8)
    for phase, T in ((Phase.DECODE, 1), (Phase.DECODE, 3), (Phase.PREFILL, 37)):
        x = rows(T, 160, seed=10)
        expected = alone(x, phase)
        results = [crowd(x, phase) for _ in range(100)]
        assert all(mx.array_equal(got, expected) for got in results)


def test_spans_of_a_decode_step_are_joined_after_the_last_of_them():
    heads = HeadGeometry(6, 3, 40)
    cache = KVCache(3, 40, 700)
    cache.append(*(rows(641, 120, seed=seed).reshape(641, 3, 40) for seed in (11, 12)))
    q = rows(6, 40, seed=13).reshape(1, 6, 40)

    def attend(threads):
        return HostKernels(KernelPolicy(threads=threads)).attend(heads, 0.2, None, None)

    alone, crowd = attend(1), attend(8)
    expected = alone(q, cache, Phase.DECODE)
    results = [crowd(q, cache, Phase.DECODE) for _ in range(300)]
    assert all(mx.array_equal(got, expected) for got in results)


def test_the_pool_rests_a_tenth_of_a_second_after_a_call():
    run, x = projection(257, 4, 1), rows(1, 160)
    run(x, Phase.DECODE)
    time.sleep(0.1)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.03


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_pool_of_its_own():
    run, x = projection(257, 2, 1), rows(1, 160)
    expected = run(x, Phase.DECODE)[0]
    mx.eval(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        got = run(x, Phase.DECODE)[0]
        os._exit(0 if memoryview(got) == memoryview(expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""A verify cut short: recurrent states as if nothing had been drafted, bit for bit."""

import functools

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import (
    build_model,
    feed,
    float_weights,
    int4_weights,
    kernel_sets,
    load_golden,
)

from turbospark.caches.rollback import checkpoint, retain
from turbospark.kernels.device import on_cpu
from turbospark.protocols import Phase

KERNELS = kernel_sets()
PROMPT, DRAFTED, REST = 12, 6, 6
pytestmark = pytest.mark.skipif(not on_cpu(), reason="bits are promised on a CPU")


@functools.cache
def built(name, kernels, weights):
    golden = load_golden(name)
    return build_model(golden.config, weights(golden), KERNELS[kernels])


@functools.cache
def prompted(name, kernels, weights):
    model = built(name, kernels, weights)
    caches = model.make_caches(64, 9)
    feed(model, load_golden(name).tokens[:PROMPT], [PROMPT], caches=caches)
    return caches


@functools.cache
def never_drafted(name, kernels, weights):
    """Caches after each token behind the prompt, and the logits [n, V] of these tokens."""
    model, after, rows = built(name, kernels, weights), [], []
    caches = [cache.fork() for cache in prompted(name, kernels, weights)]
    for token in load_golden(name).tokens[PROMPT : PROMPT + DRAFTED + REST]:
        rows.append(feed(model, token[None], [1], phase=Phase.DECODE, caches=caches))
        after.append([cache.fork() for cache in caches])
    return after, np.concatenate(rows)


class Run:
    """A prompt fed, six rows verified, of which the first `keep` are kept."""

    def __init__(self, name, kernels, keep, weights=float_weights):
        self.golden = load_golden(name)
        self.model = built(name, kernels, weights)
        self.caches = [cache.fork() for cache in prompted(name, kernels, weights)]
        self.point = checkpoint(self.caches)
        rows = self.golden.tokens[PROMPT : PROMPT + DRAFTED].copy()
        rows[keep:] = (rows[keep:] + 1) % 320
        step = mx.array(rows)
        self.out = self.model(step, self.caches, phase=Phase.DECODE, logits="all", record=True)
        self.keep = keep

    def rest(self):
        """Logits of further tokens, one by one."""
        tokens = self.golden.tokens[PROMPT + self.keep : PROMPT + self.keep + REST]
        return feed(self.model, tokens, [1] * REST, phase=Phase.DECODE, caches=self.caches)


@pytest.mark.parametrize("kernels", sorted(KERNELS))
@pytest.mark.parametrize("weights", [float_weights, int4_weights])
@pytest.mark.parametrize("keep", range(1, DRAFTED + 1))
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen4_exp_tied"])
def test_state_and_tail_are_those_of_never_having_drafted(name, keep, weights, kernels):
    run = Run(name, kernels, keep, weights)
    retain(run.caches, run.point, keep, run.out.row_inputs)
    after, rows = never_drafted(name, kernels, weights)
    for ours, theirs in zip(run.caches, after[keep - 1], strict=True):
        if ours.recurrent:
            assert all(map(np.array_equal, map(np.array, ours.state), map(np.array, theirs.state)))
    assert np.array_equal(run.rest(), rows[keep : keep + REST])


@pytest.mark.parametrize("kernels", sorted(KERNELS))
@pytest.mark.parametrize("forgotten", ["tail", "weights", "both"])
def test_a_state_that_is_only_half_restored_shows(forgotten, kernels):
    run = Run("qwen3_5", kernels, 2)
    after = {i: cache.state for i, cache in enumerate(run.caches) if cache.recurrent}
    retain(run.caches, run.point, 2, run.out.row_inputs)
    for i, (tail, weights) in after.items():
        right = run.caches[i].state
        kept = {"tail": (tail, right[1]), "weights": (right[0], weights), "both": (tail, weights)}
        run.caches[i].place(run.caches[i].offset, kept[forgotten])
    _, rows = never_drafted("qwen3_5", kernels, float_weights)
    assert np.abs(run.rest() - rows[2 : 2 + REST]).max() > 0.1


def test_row_inputs_of_another_pass_give_another_state():
    run = Run("qwen3_5", "reference", 2)
    first = run.out.row_inputs[0]
    other = run.model(
        mx.array(run.golden.tokens[:DRAFTED]), run.caches, phase=Phase.DECODE, record=True
    ).row_inputs[0]
    assert not np.array_equal(first.replay(2)[1], other.replay(2)[1])


def test_a_kept_reference_outlives_the_passes_after_it():
    run = Run("qwen3_5", "reference", 3)
    held = [np.array(part) for state in run.point.recurrent.values() for part in state]
    run.rest()
    again = [np.array(part) for state in run.point.recurrent.values() for part in state]
    assert all(map(np.array_equal, held, again))

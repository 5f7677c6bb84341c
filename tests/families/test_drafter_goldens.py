"""Drafter modules against what torch computed for the same weights."""

import mlx.core as mx
import numpy as np
import pytest
from golden.drafter_fixtures import (
    CONTEXT,
    drafter_module,
    load_drafter_golden,
    run_trunk,
    trunk_of,
)
from golden.drafter_recipes import ACCEPTED, BLOCKS, CHAIN, HEADS, PROMPT
from golden.fixtures import kernel_sets

from turbospark.protocols import Phase

KERNELS = kernel_sets()
LAYER = 2e-5  # of one layer given its input
LOGITS = 5e-4  # behind a whole trunk


@pytest.fixture(params=sorted(KERNELS), scope="module")
def kernels(request):
    return KERNELS[request.param]


@pytest.fixture(params=sorted(HEADS), scope="module")
def head_name(request):
    return request.param


@pytest.fixture(params=sorted(BLOCKS), scope="module")
def block_name(request):
    return request.param


def head_run(name, kernels):
    golden, head = load_drafter_golden(name), drafter_module(name, kernels)
    following = np.append(golden.arrays["ids"][1:], golden.arrays["anchor"])
    return golden.arrays, head, following


def advance(head, tokens, hidden, caches, phase=Phase.PREFILL):
    tokens = mx.array(np.asarray(tokens, dtype=np.int32))
    return head(tokens, mx.array(hidden), caches, phase)


def largest(got, expected):
    return float(np.abs(np.array(got) - expected).max())


def test_a_batch_of_head_rows_equals_torch(head_name, kernels):
    arrays, head, following = head_run(head_name, kernels)
    y = advance(head, following, arrays["hidden"], head.make_caches(CONTEXT))
    assert largest(y, arrays["batch"]) < LAYER


def test_head_rows_step_by_step_equal_torch(head_name, kernels):
    arrays, head, following = head_run(head_name, kernels)
    caches = head.make_caches(CONTEXT)
    rows = [
        np.array(advance(head, [token], row[None], caches, Phase.DECODE))[0]
        for token, row in zip(following, arrays["hidden"], strict=True)
    ]
    assert largest(np.stack(rows), arrays["stepwise"]) < LAYER


def test_rows_that_are_only_written_serve_as_those_computed(head_name, kernels):
    arrays, head, following = head_run(head_name, kernels)
    caches = head.make_caches(CONTEXT)
    hidden = mx.array(arrays["hidden"])
    head.write(mx.array(following[:-1]), hidden[:-1], caches, Phase.PREFILL)
    y = advance(head, following[-1:], arrays["hidden"][-1:], caches, Phase.DECODE)
    assert largest(y[0], arrays["stepwise"][-1]) < LAYER


def test_a_chain_of_drafts_equals_torch(head_name, kernels):
    arrays, head, following = head_run(head_name, kernels)
    caches = head.make_caches(CONTEXT)
    y = advance(head, following, arrays["hidden"], caches)[-1:]
    for step in range(CHAIN + 1):
        logits = np.array(head.logits(y, Phase.DECODE))[0]
        assert largest(y[0], arrays["chain_hidden"][step]) < LAYER
        assert largest(logits, arrays["chain_logits"][step]) < LOGITS
        if step < CHAIN:
            assert logits.argmax() == arrays["chain_tokens"][step]
            y = advance(head, [logits.argmax()], y, caches, Phase.DECODE)


def test_a_head_over_its_own_trunk_equals_torch(head_name, kernels):
    arrays, head, following = head_run(head_name, kernels)
    hidden = run_trunk(trunk_of(head_name, kernels), arrays["ids"]).hidden
    assert largest(hidden, arrays["hidden"]) < LOGITS
    y = advance(head, following, hidden, head.make_caches(CONTEXT))
    assert largest(head.logits(y[-1:], Phase.DECODE)[0], arrays["chain_logits"][0]) < LOGITS


def block_run(name, kernels, turn, aux=None):
    golden, drafter = load_drafter_golden(name), drafter_module(name, kernels)
    caches = drafter.make_caches(CONTEXT, 3)
    streams = mx.array(golden.arrays[f"aux{turn}"]) if aux is None else aux
    drafter.write(streams, caches, Phase.PREFILL)
    return golden.arrays, drafter, caches


@pytest.mark.parametrize("turn", [1, 2])
def test_a_block_equals_torch(block_name, kernels, turn):
    arrays, drafter, caches = block_run(block_name, kernels, turn)
    masks = [drafter.config.mask_token_id] * (drafter.rows - 1)
    tokens = mx.array([int(arrays[f"anchor{turn}"]), *masks])
    hidden = drafter.hidden(tokens, caches, Phase.DECODE)
    assert largest(hidden, arrays[f"hidden{turn}"]) < 3 * LAYER  # three layers
    logits = drafter.logits(hidden, Phase.DECODE)
    assert largest(logits, arrays[f"logits{turn}"]) < LOGITS


@pytest.mark.parametrize("turn", [1, 2])
def test_proposals_equal_torch(block_name, kernels, turn):
    arrays, drafter, caches = block_run(block_name, kernels, turn)
    tokens, hidden = drafter.propose(int(arrays[f"anchor{turn}"]), caches)
    assert np.array(tokens).tolist() == arrays[f"proposals{turn}"].tolist()
    assert largest(hidden, arrays[f"hidden{turn}"][1:]) < 3 * LAYER


def test_context_rows_equal_torch(block_name, kernels):
    arrays, _, caches = block_run(block_name, kernels, 1)
    for i, cache in enumerate(caches):
        rows = cache.export()
        first = int(rows["span"][0].item())
        for name in "kv":
            assert largest(rows[name].swapaxes(0, 1), arrays[f"{name}{i}"][first:]) < LAYER


def test_a_second_round_over_the_trunks_own_streams_proposes_as_torch(block_name, kernels):
    golden = load_drafter_golden(block_name).arrays
    trunk, drafter = trunk_of(block_name, kernels), drafter_module(block_name, kernels)
    taps, caches = drafter.taps, trunk.make_caches(CONTEXT, 16)
    context = drafter.make_caches(CONTEXT, 3)

    def follow(ids):
        output = run_trunk(trunk, ids, taps, caches)
        streams = mx.concatenate([output.taps[tap] for tap in taps], axis=-1)
        drafter.write(streams, context, Phase.PREFILL)

    follow(golden["ids1"])
    first, _ = drafter.propose(int(golden["anchor1"]), context)
    assert np.array(first).tolist() == golden["proposals1"].tolist()
    follow([int(golden["anchor1"]), *np.array(first)[:ACCEPTED]])
    assert context[0].offset == PROMPT + 1 + ACCEPTED
    second, _ = drafter.propose(int(golden["anchor2"]), context)
    assert np.array(second).tolist() == golden["proposals2"].tolist()


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_context_written_in_portions_proposes_the_same(block_name, kernels, size):
    arrays, drafter, whole = block_run(block_name, kernels, 2)
    parts, aux = drafter.make_caches(CONTEXT, 3), arrays["aux2"]
    for start in range(0, len(aux), size):
        drafter.write(mx.array(aux[start : start + size]), parts, Phase.PREFILL)
    anchor = int(arrays["anchor2"])
    (_, hidden), (_, again) = (drafter.propose(anchor, caches) for caches in (whole, parts))
    assert largest(hidden, np.array(again)) == 0

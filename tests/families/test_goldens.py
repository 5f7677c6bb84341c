"""Families against logits that transformers computed for the same weights."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import (
    NAMES,
    assert_same_logits,
    build_model,
    feed,
    float_weights,
    int4_weights,
    kernel_sets,
    load_golden,
    passes,
)

from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.protocols import Phase

KERNELS = kernel_sets()
PROMPT, CONTEXT, SLACK = 24, 64, 5  # so few rows of slack that every ring wraps
WEIGHTS = {"full": float_weights, "int4": int4_weights}


@pytest.fixture(scope="module", params=sorted(KERNELS))
def kernels(request):
    return KERNELS[request.param]


@pytest.fixture(scope="module", params=sorted(WEIGHTS))
def kind(request):
    return request.param


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    return load_golden(request.param)


@pytest.fixture(scope="module")
def model(golden, kind, kernels):
    return build_model(golden.config, WEIGHTS[kind](golden), kernels)


@pytest.fixture(scope="module")
def one_pass(model, golden):
    return feed(model, golden.tokens, [len(golden.tokens)])


def test_one_pass_equals_transformers(golden, kind, one_pass):
    assert golden.difference(one_pass, kind) < golden.tolerance


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_chunk_size_does_not_change_logits(model, golden, one_pass, size):
    count = 21 if size == 1 else len(golden.tokens)  # a ring has wrapped by then
    caches = model.make_caches(CONTEXT, SLACK)
    chunked = feed(model, golden.tokens[:count], passes(count, size), caches=caches)
    assert_same_logits(model, chunked, one_pass[:count])


def test_cached_decode_equals_transformers(model, golden, kind):
    caches = model.make_caches(CONTEXT, SLACK)
    prompt, rest = golden.tokens[:PROMPT], golden.tokens[PROMPT:]
    first = feed(model, prompt, [PROMPT], caches=caches)
    then = feed(model, rest, [1] * len(rest), phase=Phase.DECODE, caches=caches)
    assert golden.difference(np.concatenate([first, then]), kind) < golden.tolerance


def test_rows_of_a_verify_equal_stepwise_decode(model, golden):
    runs = []
    for sizes in ([1] * 9, [4, 1, 3, 1]):
        caches = model.make_caches(CONTEXT, SLACK)
        feed(model, golden.tokens[:PROMPT], [PROMPT], caches=caches)
        rest = golden.tokens[PROMPT : PROMPT + 9]
        runs.append(feed(model, rest, sizes, phase=Phase.DECODE, caches=caches))
    assert_same_logits(model, *runs)


def test_going_back_within_the_slack_of_a_wrapped_ring_changes_nothing(model, golden, one_pass):
    caches = model.make_caches(CONTEXT, SLACK)
    if any(cache.recurrent for cache in caches):
        pytest.skip("recurrent layers go back to checkpoints only")
    feed(model, golden.tokens[:PROMPT], [PROMPT], caches=caches)
    for count in range(1, SLACK + 1):
        for cache in caches:
            cache.rewind(count)
        again = feed(model, golden.tokens[PROMPT - count : PROMPT], [count], caches=caches)
        assert_same_logits(model, again, one_pass[PROMPT - count : PROMPT])


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("name", [name for name in NAMES if load_golden(name).stream is not None])
def test_every_layer_equals_transformers_given_its_input(name, phase, kernels):
    golden = load_golden(name)
    model = build_model(golden.config, float_weights(golden), kernels)
    last = len(model.model.layers) - 1
    for i, layer in enumerate(model.model.layers):
        h, _ = layer(mx.array(golden.stream[i]), model.make_caches(64, SLACK)[i], phase)
        out = rms_norm_reference(h, model.model.norm.value) if i == last else h
        assert np.abs(np.array(out) - golden.stream[i + 1]).max() < 2e-5, i


def test_both_spellings_of_a_config_are_one_model(golden):
    weights = float_weights(golden)
    older, newer = (
        feed(build_model(config, weights), golden.tokens[:17], [17])
        for config in (golden.config, golden.config_v5)
    )
    assert np.array_equal(older, newer)  # the same operations, so on a GPU too

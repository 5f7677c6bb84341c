"""Compiled decode steps against the same passes taken eagerly."""

import mlx.core as mx
import numpy as np
import pytest
from golden.tiny import TINY, tiny_model

from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel

TOKENS = np.random.default_rng(3).integers(0, 67, size=330).astype(np.int32)
PROMPT = 11


def feed(model, caches, tokens, **wish):
    return model(mx.array(np.array(tokens, dtype=np.int32)), caches, **wish)


def prefilled(model, count=PROMPT):
    caches = model.make_caches(512, 9)
    feed(model, caches, TOKENS[:count], phase=Phase.PREFILL)
    return caches


@pytest.fixture(scope="module", params=sorted(TINY))
def model(request):
    return tiny_model(request.param)


@pytest.fixture
def uncompiled():
    """Every pass is traced and run as it is: on a CPU a compiler takes seconds for each graph."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def close(got, wanted):
    np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-4)


@pytest.mark.usefixtures("uncompiled")
def test_compiled_steps_equal_eager_ones(model):
    compiled = CompiledModel(model)
    ours, theirs = prefilled(model), prefilled(model)
    for token in TOKENS[PROMPT : PROMPT + 20]:
        got = feed(compiled, ours, [token], phase=Phase.DECODE)
        close(got.logits, feed(model, theirs, [token], phase=Phase.DECODE).logits)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("start", [1, 120, 127, 128, 131, 300])
def test_a_step_reads_sealed_rows_and_tail_wherever_it_starts(start):
    model = tiny_model("gemma3_text")
    ours, theirs = prefilled(model, start), prefilled(model, start)
    for size in (3, 1, 7):
        tokens = TOKENS[:size]
        got = feed(CompiledModel(model), ours, tokens, phase=Phase.DECODE, logits="all")
        close(got.logits, feed(model, theirs, tokens, phase=Phase.DECODE, logits="all").logits)


@pytest.mark.usefixtures("uncompiled")
def test_several_rows_with_hidden_and_taps_equal_an_eager_pass(model):
    wish = {"phase": Phase.DECODE, "logits": "all", "hidden": True, "taps": (0, 1)}
    got = feed(CompiledModel(model), prefilled(model), TOKENS[PROMPT:16], **wish)
    wanted = feed(model, prefilled(model), TOKENS[PROMPT:16], **wish)
    close(got.logits, wanted.logits)
    close(got.hidden, wanted.hidden)
    for tap in (0, 1):
        close(got.taps[tap], wanted.taps[tap])


def test_a_graph_is_traced_once_for_300_tokens_but_where_sealed_rows_grow():
    model = tiny_model("gemma3_text")
    compiled = CompiledModel(model)
    ours, theirs = prefilled(model), prefilled(model)
    for token in TOKENS[PROMPT : PROMPT + 300]:
        got = feed(compiled, ours, [token], phase=Phase.DECODE)
        mx.eval(got.logits)
    feed(model, theirs, TOKENS[PROMPT : PROMPT + 299], phase=Phase.PREFILL)
    close(got.logits, feed(model, theirs, [TOKENS[PROMPT + 299]], phase=Phase.DECODE).logits)
    # No row sealed; 128 of them; 256: the rings of the tiny model are full from the first on.
    assert compiled.traces == 3

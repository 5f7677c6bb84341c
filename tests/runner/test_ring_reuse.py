"""Prefix reuse over real caches: full rows and a ring that has wrapped."""

from pathlib import Path

import numpy as np
import pytest

import turbospark as ts
from turbospark.runner.loops import prefill
from turbospark.runner.runner import Runner
from turbospark.testing import write_tiny_checkpoint

WINDOW, SLACK = 9, 4
PROMPT = np.random.default_rng(1).integers(0, 256, 2 * WINDOW + 3).tolist()


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> ts.Engine:
    folder = tmp_path_factory.mktemp("models") / "sliding"
    write_tiny_checkpoint(folder, model_type="mistral", sliding_window=WINDOW)
    return ts.load(folder, ring_slack=SLACK, kernels="reference")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> ts.Engine:
    folder: Path = tmp_path_factory.mktemp("models") / "full"
    return ts.load(write_tiny_checkpoint(folder), kernels="reference")


def runner_of(engine: ts.Engine) -> Runner:
    return engine.session().runner


def logits(runner: Runner, prompt: list[int], chunk: int = 5) -> list[float]:
    row = prefill(runner, prompt, chunk=chunk).logits
    assert row is not None
    return np.asarray(row).tolist()


@pytest.mark.parametrize("back", [1, SLACK, SLACK + 1, WINDOW + 1, len(PROMPT) - 1])
def test_a_wrapped_ring_goes_back_within_its_slack_or_starts_over(
    sliding: ts.Engine, back: int
) -> None:
    runner = runner_of(sliding)
    logits(runner, PROMPT)
    prompt = [*PROMPT[: len(PROMPT) - back], 200, 201, 202]
    reachable = back <= runner.session.candidate().max_rewind
    reuse = runner.try_reuse_prefix(prompt)
    assert reuse.tokens == (len(PROMPT) - back if reachable else 0)
    assert reachable == (back <= SLACK)
    assert logits(runner, prompt) == logits(runner_of(sliding), prompt)


@pytest.mark.parametrize("back", [1, 5, len(PROMPT) - 1])
def test_full_caches_go_back_anywhere(full: ts.Engine, back: int) -> None:
    runner = runner_of(full)
    logits(runner, PROMPT)
    prompt = [*PROMPT[: len(PROMPT) - back], 200, 201, 202]
    assert runner.try_reuse_prefix(prompt).tokens == len(PROMPT) - back
    assert logits(runner, prompt) == logits(runner_of(full), prompt)


@pytest.mark.parametrize("back", [1, WINDOW + 1, len(PROMPT) - 1])
def test_a_ring_that_never_wraps_goes_back_anywhere(
    tmp_path: Path, sliding: ts.Engine, back: int
) -> None:
    write_tiny_checkpoint(tmp_path, model_type="mistral", sliding_window=WINDOW)
    runner = runner_of(ts.load(tmp_path, ring_slack=999, max_context=60, kernels="reference"))
    logits(runner, PROMPT)
    prompt = [*PROMPT[: len(PROMPT) - back], 200, 201, 202]
    assert runner.try_reuse_prefix(prompt).tokens == len(PROMPT) - back
    assert logits(runner, prompt) == logits(runner_of(sliding), prompt)


def test_chunk_size_does_not_change_a_bit(sliding: ts.Engine) -> None:
    rows = [logits(runner_of(sliding), PROMPT, chunk) for chunk in (1, 3, 7, len(PROMPT))]
    assert rows[1:] == rows[:-1]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_closed_stream_continues_as_if_cold(sliding: ts.Engine, after: int) -> None:
    stream = sliding.stream(PROMPT, max_tokens=20)
    tokens = [next(stream).token for _ in range(after)]
    stream.close()  # type: ignore[attr-defined]
    longer = [*PROMPT, *tokens, 7, 8]
    model, tokenizer = sliding
    cold = ts.generate(model, tokenizer, longer, max_tokens=8)
    warm = sliding.generate(longer, max_tokens=8)
    assert warm.token_ids == cold.token_ids
    if after:
        assert warm.reused_tokens == len(PROMPT) + after - 1


def test_the_position_equals_the_fed_ids_after_every_phase(sliding: ts.Engine) -> None:
    runner = sliding.runner
    for part in sliding.stream(PROMPT, max_tokens=6):
        fed = runner.session.fed_ids.ids
        assert fed == [*PROMPT, *part.token_ids[:-1]]
        assert all(cache.offset == len(fed) for cache in runner.session.caches)


@pytest.mark.parametrize("fed", [WINDOW - 2, WINDOW + SLACK - 1, len(PROMPT)])
@pytest.mark.parametrize("keep", range(1, SLACK + 1))
def test_rows_kept_of_a_verify_equal_rows_fed_one_by_one(
    sliding: ts.Engine, fed: int, keep: int
) -> None:
    """Before the ring wraps, while it does, and after: bit for bit."""
    feed = [200, 201, 202, 203]
    runner, never = runner_of(sliding), runner_of(sliding)
    for one in (runner, never):
        logits(one, PROMPT[:fed])
    point = runner.checkpoint()
    verified = runner.verify(feed, fed)
    if keep < len(feed):
        runner.rollback_retaining(point, keep, verified)
    runner.record_committed(feed[:keep], fed, verified)
    steps = [np.asarray(never.produce(feed[i], fed + i)).tolist() for i in range(keep)]
    assert np.asarray(verified.logits).tolist()[:keep] == steps
    for token, position in ((210, fed + keep), (211, fed + keep + 1)):
        rows = [np.asarray(one.produce(token, position)).tolist() for one in (runner, never)]
        assert rows[0] == rows[1]
    assert runner.session.fed_ids.ids == never.session.fed_ids.ids


def test_a_verify_that_a_wrapped_ring_could_not_take_back_is_refused(sliding: ts.Engine) -> None:
    runner = runner_of(sliding)
    logits(runner, PROMPT)
    with pytest.raises(ts.ProducerError, match=r"cannot verify 5 tokens: .* take back 4"):
        runner.verify([1, 2, 3, 4, 5], len(PROMPT))
    assert runner.session.position == len(PROMPT)

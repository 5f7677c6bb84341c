"""One step of sampling: options, refusals, custom samplers and processors."""

import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turbospark.errors import NonFiniteError, OptionError
from turbospark.sampling.select import Chooser
from turbospark.sampling.uniform import fresh_seed, seeded_uniform
from turbospark.settings import GenerationConfig

ROW = mx.array([0.5, 2.0, 2.0, -1.0, 1.0])


def choose(row: mx.array = ROW, history: list[int] | None = None, **options: object) -> int:
    rest = {
        key: options.pop(key) for key in ("logit_bias", "processors", "sampler") if key in options
    }
    chooser = Chooser(GenerationConfig(**options), 5, **rest)  # type: ignore[arg-type]
    history = [0] if history is None else history
    return chooser.choose(row, history, 1).token


def test_temperature_0_takes_the_first_of_equals_whatever_else_is_set() -> None:
    assert choose() == 1
    assert choose(history=[0, 1], repetition_penalty=9.0, presence_penalty=2.0, top_k=1) == 1


def test_presence_penalty_leaves_the_prompt_alone() -> None:
    options = {"temperature": 0.01, "presence_penalty": 2.0, "seed": 1}
    row = mx.array([0.0, 2.0, 1.0, 0.0, 0.0])
    assert choose(row, [1], **options) == 1
    assert choose(row, [0, 1], **options) == 2


def test_a_seed_repeats_and_steps_differ() -> None:
    tokens = [choose(history=[0] * n, temperature=2.0, seed=11) for n in range(1, 40)]
    assert tokens == [choose(history=[0] * n, temperature=2.0, seed=11) for n in range(1, 40)]
    assert len(set(tokens)) > 2
    assert tokens != [choose(history=[0] * n, temperature=2.0, seed=12) for n in range(1, 40)]


def test_without_a_seed_generations_differ() -> None:
    assert fresh_seed() != fresh_seed()
    assert Chooser(GenerationConfig(), 5).seed != Chooser(GenerationConfig(), 5).seed


def test_draws_without_a_seed_never_meet_though_the_clock_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for clock in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: 7)
    choosers = [Chooser(GenerationConfig(temperature=1.0), 5) for _ in range(40)]
    numbers = {
        chooser.uniform(step, stream)
        for chooser in choosers
        for step in range(10)
        for stream in range(4)
    }
    assert len(numbers) == 1600


def test_uniforms_are_uniform_and_independent_of_neighbours() -> None:
    values = np.array([seeded_uniform(3, step) for step in range(20_000)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi-square, 9 degrees, one in a thousand
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert seeded_uniform(0, 0) != seeded_uniform(0, 1)


def test_no_two_purposes_share_a_number_at_any_step() -> None:
    numbers = {seeded_uniform(3, step, stream) for step in range(500) for stream in range(4)}
    assert len(numbers) == 2000
    target, *others = (
        np.array([seeded_uniform(3, step, stream) for step in range(5000)]) for stream in range(4)
    )
    for other in others:
        assert abs(np.corrcoef(target, other)[0, 1]) < 0.05
        assert abs(np.corrcoef(target[1:], other[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("stream", range(4))
def test_an_array_of_seeds_gives_each_seeds_own_number(stream: int) -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    alone = [seeded_uniform(int(seed), 7, stream) for seed in seeds]
    assert seeded_uniform(seeds, 7, stream).tolist() == alone


def test_a_seed_gives_the_same_number_in_every_version() -> None:
    assert seeded_uniform(1, 7) == 0.25142885573188245


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_our_own_error(temperature: float, bad: float) -> None:
    row = mx.array([0.0, 1.0, bad, 0.0, 0.0])
    for sampler in (None, lambda scores: mx.argmax(scores, axis=-1)):
        options = {"temperature": temperature} if sampler is None else {}
        chooser = Chooser(GenerationConfig(**options), 5, sampler=sampler)
        with pytest.raises(NonFiniteError, match="position 1"):
            chooser.choose(row, [3], 1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_is_looked_at_once(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of it was checked by the producer, which knows the layer at fault."""

    def refused(_: object) -> None:
        raise AssertionError("the whole row was checked again")

    monkeypatch.setattr(np, "isfinite", refused)
    choose(mx.array([0.0, 1.0, -float("inf"), 0.0, 0.0]), temperature=temperature)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 257}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 257}, "logprobs"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, float], name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}="):
        choose(**options)


def test_the_borders_of_each_range_are_allowed() -> None:
    choose(temperature=1e-4, top_p=1.0, top_k=256, min_p=0.0, seed=2**64 - 1, logprobs=5)
    choose(temperature=1.0, repetition_penalty=1e6, history=[1, 2])
    choose(temperature=1.0, repetition_penalty=1e-6, history=[1, 2])


def test_the_least_temperature_is_greedy() -> None:
    assert choose(mx.array([0.5, 1.0, 2.0, 2.5, -1.0]), temperature=5e-324) == 3


@pytest.mark.parametrize("token", [5, -1, 1.5, "x", True, None, "9" * 5000])
def test_logit_bias_outside_the_vocabulary_is_refused(token: object) -> None:
    with pytest.raises(OptionError, match="logit_bias names token"):
        choose(logit_bias={token: 1.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, 1e39, 10**400, True])
def test_logit_bias_takes_numbers_alone(value: object) -> None:
    with pytest.raises(OptionError, match=r"logit_bias\[3\]"):
        choose(logit_bias={3: value})


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_logit_bias_moves_and_bans(temperature: float) -> None:
    assert choose(logit_bias={3: 5.0}, temperature=temperature) == 3
    assert choose(logit_bias={"3": 5.0}, temperature=temperature) == 3
    assert choose(logit_bias={np.int64(3): np.float32(5.0)}, temperature=temperature) == 3
    ban = -float("inf")
    assert choose(logit_bias={1: ban, 2: ban}, temperature=temperature) == 4


def test_a_ban_on_everything_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match="left no token to choose"):
        choose(logit_bias=dict.fromkeys(range(5), -float("inf")))


def test_processors_see_the_whole_text_and_run_in_order() -> None:
    seen: list[list[int]] = []

    def first(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        assert logits.shape == (1, 5)
        return logits * 0

    def second(_tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + mx.array([0.0, 0.0, 0.0, 0.0, 1.0])

    assert choose(history=[2, 3, 4], processors=[first, second]) == 4
    assert seen == [[2, 3, 4]]


def test_processors_of_mlx_lm_are_honoured() -> None:
    utils = pytest.importorskip("mlx_lm.sample_utils")
    processors = utils.make_logits_processors(logit_bias={3: 9.0}, repetition_penalty=1.5)
    assert choose(history=[1, 2], processors=processors) == 3


@pytest.mark.parametrize(
    "answer", [None, 1.0, mx.zeros((1, 4)), mx.zeros((5,)), mx.zeros((1, 1, 5))]
)
def test_a_processor_gives_logits_of_the_same_shape(answer: Any) -> None:
    with pytest.raises(OptionError, match=r"processor gave .*, not logits of shape \(1, 5\)"):
        choose(processors=[lambda _, __: answer])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, np.float32])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_processors_may_compute_in_another_type(dtype: Any, temperature: float) -> None:
    def to_type(_tokens: mx.array, logits: mx.array) -> Any:
        return np.array(logits) if dtype is np.float32 else logits.astype(dtype)

    bias = {3: 9.0}
    assert choose(processors=[to_type], logit_bias=bias, temperature=temperature) == 3


@pytest.mark.parametrize("processors", [5, "ab", [5], lambda _, logits: logits])
def test_processors_are_a_list_of_functions(processors: Any) -> None:
    with pytest.raises(OptionError, match="logits_processors"):
        choose(processors=processors)


def test_a_sampler_sees_log_probabilities_and_decides() -> None:
    def sampler(logprobs: mx.array) -> mx.array:
        assert logprobs.shape == (1, 5)
        assert mx.exp(logprobs).sum().item() == pytest.approx(1.0)
        return mx.array([3])

    assert choose(sampler=sampler) == 3


def test_a_sampler_of_mlx_lm_is_honoured() -> None:
    utils = pytest.importorskip("mlx_lm.sample_utils")
    assert choose(sampler=utils.make_sampler(temp=0.0)) == 1


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "seed"])
def test_options_that_a_sampler_replaces_are_refused_beside_it(name: str) -> None:
    value = {"top_k": 3, "seed": 1}.get(name, 0.5)
    with pytest.raises(OptionError, match=f"{name} and a custom sampler"):
        choose(sampler=lambda _: 0, **{name: value})


def test_a_sampler_may_not_leave_the_vocabulary() -> None:
    with pytest.raises(OptionError, match="token 5"):
        choose(sampler=lambda _: mx.array([5]))


@pytest.mark.parametrize(
    "answer", [None, "a", 1.5, mx.array([1.0]), mx.array([1, 2]), mx.zeros((1,), mx.bfloat16)]
)
def test_a_sampler_gives_one_token_id(answer: Any) -> None:
    with pytest.raises(OptionError, match="not one token id"):
        choose(sampler=lambda _: answer)


def test_logprobs_name_the_likeliest_and_the_chosen() -> None:
    choice = Chooser(GenerationConfig(logprobs=3), 5).choose(ROW, [0], 1)
    expected = np.array(ROW - mx.logsumexp(ROW))
    assert [token for token, _ in choice.top_logprobs] == [1, 2, 4]
    assert [value for _, value in choice.top_logprobs] == pytest.approx(
        expected[[1, 2, 4]], abs=1e-6
    )
    assert choice.logprob == pytest.approx(expected[1], abs=1e-6)
    assert Chooser(GenerationConfig(), 5).choose(ROW, [0], 1).logprob is None

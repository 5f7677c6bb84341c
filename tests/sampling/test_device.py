"""Tokens chosen on the device against those chosen on the host."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.sampling.device import NOTHING, DevicePicker, serves
from turbospark.sampling.select import Chooser
from turbospark.settings import GenerationConfig

RANDOM = np.random.default_rng(9)
ROWS = [mx.array(RANDOM.normal(size=(1, 613)) * spread, mx.float32) for spread in (0.3, 2, 6)]


@pytest.fixture(autouse=True)
def uncompiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 0.3, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.05},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 256},
    ],
)
def test_the_device_draws_what_the_host_draws_with_the_same_uniform(values):
    chooser = Chooser(GenerationConfig(seed=5, **values), 613)
    picker, history = DevicePicker(chooser), [1, 2, 3]
    for row in ROWS:
        for step in range(12):
            got = picker.pick(row, step)
            wanted = chooser.choose(row[0], [*history, *[9] * step], 3).token
            assert got.item() == wanted
            assert got.shape == (1,)


def test_of_equal_scores_the_lower_id_is_taken():
    row = mx.zeros((1, 31))
    assert DevicePicker(Chooser(GenerationConfig(), 31)).pick(row, 0).item() == 0
    ties = Chooser(GenerationConfig(temperature=1.0, top_k=4, seed=1), 31)
    picked = {DevicePicker(ties).pick(row, step).item() for step in range(40)}
    assert picked == {0, 1, 2, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_gives_nothing(bad, temperature):
    row = mx.array(np.full((1, 31), 0.5, np.float32))
    row[0, 17] = bad
    chooser = Chooser(GenerationConfig(temperature=temperature, seed=1), 31)
    assert DevicePicker(chooser).pick(row, 0).item() == NOTHING


def test_what_hangs_on_earlier_tokens_or_on_the_caller_is_left_to_the_host():
    assert serves(Chooser(GenerationConfig(), 31))
    assert serves(Chooser(GenerationConfig(repetition_penalty=1.3), 31))  # greedy ignores it
    warm = {"temperature": 0.5}
    assert serves(Chooser(GenerationConfig(**warm, top_p=0.9), 31))
    for values in (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logprobs": 2},
    ):
        assert not serves(Chooser(GenerationConfig(**warm, **values), 31))
    assert not serves(Chooser(GenerationConfig(), 31, logit_bias={3: 1.0}))
    assert not serves(Chooser(GenerationConfig(), 31, processors=[lambda _, row: row]))
    assert not serves(Chooser(GenerationConfig(), 31, sampler=lambda row: mx.argmax(row, -1)))

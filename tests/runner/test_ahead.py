"""Decoding one step ahead against the plain loop."""

import mlx.core as mx
import numpy as np
import pytest
from golden.tiny import tiny_model

from turbospark.errors import NonFiniteError
from turbospark.runner.ahead import decode_ahead
from turbospark.runner.loops import decode, prefill
from turbospark.runner.runner import Runner
from turbospark.runner.sink import TokenSink
from turbospark.runner.step import CompiledModel
from turbospark.sampling.device import DevicePicker
from turbospark.sampling.select import Chooser
from turbospark.sessions.session import Session
from turbospark.settings import GenerationConfig
from turbospark.testing import ByteTokenizer

PROMPT = [5, 11, 42, 3, 8, 19, 33]
BUDGET = 23


@pytest.fixture(autouse=True)
def uncompiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_5", "llama"])
def model(request):
    return tiny_model(request.param)


class Generation:
    """A prompt that was fed, ready to decode either way."""

    def __init__(self, model, *, stops=(), **values):
        compiled = CompiledModel(model)
        self.session = Session(lambda: model.make_caches(90, 9), 90)
        self.runner = Runner(compiled, self.session)
        self.chooser = Chooser(GenerationConfig(seed=4, **values), model.vocab_size)
        tokenizer = ByteTokenizer()
        self.sink = TokenSink(PROMPT, tokenizer.detokenizer(), stop_ids=stops, max_tokens=BUDGET)
        self.logits = prefill(self.runner, PROMPT).logits

    def ahead(self):
        return decode_ahead(self.runner, self.logits, DevicePicker(self.chooser), self.sink)

    def plain(self):
        return decode(self.runner, self.logits, self.chooser, self.sink)


def tokens(steps):
    return [step.choice.token for step in steps]


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "top_k": 20}])
def test_text_and_record_are_those_of_the_plain_loop(model, values):
    ahead, plain = Generation(model, **values), Generation(model, **values)
    text = tokens(ahead.ahead())
    assert text == tokens(plain.plain())
    assert len(text) == BUDGET
    assert ahead.session.fed_ids.ids == plain.session.fed_ids.ids == [*PROMPT, *text[:-1]]
    assert ahead.session.position == len(PROMPT) + BUDGET - 1
    assert ahead.session.open_round is None


def test_a_stop_token_takes_the_step_ahead_back(model):
    text = tokens(Generation(model, temperature=0.9).ahead())
    stop = next(token for token in text[3:] if token not in text[:3])
    ended = Generation(model, temperature=0.9, stops={stop})
    given = tokens(ended.ahead())
    assert given == text[: text.index(stop) + 1]
    assert ended.session.fed_ids.ids == [*PROMPT, *given[:-1]]
    assert ended.session.position == len(PROMPT) + len(given) - 1


@pytest.mark.parametrize("count", [1, 2, 9])
def test_closed_at_any_token_the_session_goes_on_as_if_it_had_stopped_there(model, count):
    closed = Generation(model, temperature=0.9)
    steps = closed.ahead()
    given = [next(steps).choice.token for _ in range(count)]
    steps.close()
    assert closed.session.fed_ids.ids == [*PROMPT, *given[:-1]]
    assert closed.session.position == len(closed.session.fed_ids)
    row = closed.runner.produce(given[-1], closed.session.position)
    cold = Generation(model, temperature=0.9)
    for token in given:
        wanted = cold.runner.produce(token, cold.session.position)
    np.testing.assert_allclose(np.array(row), np.array(wanted), atol=1e-4)


def test_logits_that_are_not_finite_taint_the_session_and_name_the_layer():
    model = tiny_model("llama")
    generation = Generation(model)
    steps = generation.ahead()
    next(steps)
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[1].mlp.down_proj.weight * float(
        "nan"
    )
    with pytest.raises(NonFiniteError, match="layer 1"):
        list(steps)
    assert generation.session.fed_ids.tainted


def test_each_response_carries_the_logits_its_token_was_chosen_from(model):
    for step in Generation(model).ahead():
        assert mx.argmax(step.choice.logits).item() == step.choice.token

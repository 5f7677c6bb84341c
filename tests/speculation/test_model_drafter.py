"""What a draft model reads, and how often."""

import mlx.core as mx
import numpy as np
import pytest
from golden.tiny import tiny_model
from speculation.talk import Talk, tokens

from turbospark.errors import NonFiniteError, ProducerError
from turbospark.speculation.model import CHUNK, ModelDrafter


class Counting:
    """A model that notes how many tokens each of its passes takes."""

    def __init__(self, model):
        self.model, self.passes, self.broken = model, list[int](), False
        self.num_layers, self.vocab_size = model.num_layers, model.vocab_size

    def make_caches(self, max_context, slack):
        return self.model.make_caches(max_context, slack)

    def __call__(self, fed, caches, **given):
        self.passes.append(fed.shape[0])
        assert not self.broken
        return self.model(fed, caches, **given)


@pytest.fixture(params=["llama", "qwen3_5"])
def counting(request):
    return Counting(tiny_model(request.param))


@pytest.fixture
def talk(counting):
    talk = Talk(ModelDrafter(counting, 67))
    talk.feed(tokens(40))
    return talk


def test_nothing_is_read_before_it_is_needed(counting, talk):
    assert counting.passes == []
    talk.round(3, 1, 1)
    assert sum(counting.passes) == 41


@pytest.mark.parametrize("size", [1, 7, 100, 300])
def test_passes_end_at_the_same_places_however_the_text_comes(counting, size):
    talk, text = Talk(ModelDrafter(counting, 67)), tokens(300)
    for start in range(0, 300, size):
        talk.feed(text[start : start + size])
    talk.round(3, 1, 1)
    assert counting.passes == [CHUNK, 300 - CHUNK, 1]


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_a_round_reads_little_more_than_its_own_tokens(counting, talk, keep):
    talk.round(3, 3, 4)
    counting.passes.clear()
    talk.round(4, 3, keep)
    talk.round(5, 1, 1)
    assert sum(counting.passes) <= 2 * (keep + 4)


def test_a_fully_accepted_round_of_rows_reads_each_token_once():
    counting = Counting(tiny_model("llama"))
    talk = Talk(ModelDrafter(counting, 67))
    talk.feed(tokens(40))
    for anchor in (3, 4, 5):
        talk.round(anchor, 3, 4)
    talk.round(6, 1, 1)
    assert sum(counting.passes) == 40 + 3 * 4 + 1


def test_states_of_a_text_that_was_left_are_not_gone_back_to():
    talk = Talk(ModelDrafter(tiny_model("qwen3_5"), 67))
    talk.feed(tokens(60))
    talk.round(9, 1, 1)
    mark, place = talk.state.mark(), len(talk.ids)
    talk.feed(tokens(40, seed=1))
    talk.round(3, 2, 1)
    talk.back(place, mark)
    talk.feed(tokens(300, seed=2))
    talk.back(200)
    talk.feed([5, 6])
    np.testing.assert_allclose(talk.opinions(), talk.fresh().opinions(), atol=2e-4)


def test_logits_of_padding_fall_away_and_missing_ones_are_hopeless():
    model = tiny_model("llama")  # of 67 ids
    rows = {}
    for vocab_size in (60, 67, 75):
        talk = Talk(ModelDrafter(model, vocab_size))
        talk.feed(tokens(12))
        rows[vocab_size] = np.array(talk.drafter.step(talk.state, 5, 11))
        assert rows[vocab_size].shape == (vocab_size,)
    assert np.array_equal(rows[60], rows[67][:60])
    assert np.array_equal(rows[75][:67], rows[67])
    assert (rows[75][67:] < -1e29).all()
    assert np.isfinite(rows[75]).all()


def test_tokens_beyond_the_draft_models_table_are_read_as_some_other():
    talk = Talk(ModelDrafter(tiny_model("llama"), 90))
    talk.ids = [*tokens(12), 88]
    talk.drafter.observe(talk.state, talk.ids, 0, None)
    assert np.isfinite(np.array(talk.drafter.step(talk.state, 89, 12))).all()


def test_a_failed_pass_is_named_and_the_next_one_reads_anew(counting, talk):
    before = talk.opinions()
    counting.broken = True
    with pytest.raises(ProducerError, match="a pass of the draft model failed"):
        talk.round(3, 1, 1)
    counting.broken = False
    talk.state.rewind(40)
    np.testing.assert_allclose(talk.opinions(), before, atol=2e-4)


def test_logits_that_are_not_finite_are_refused():
    model = tiny_model("llama")
    model.model.norm.weight = mx.full(model.model.norm.weight.shape, mx.nan)
    talk = Talk(ModelDrafter(model, 67))
    talk.feed(tokens(12))
    with pytest.raises(NonFiniteError, match="draft model's row of logits at position 13"):
        talk.drafter.step(talk.state, 5, 11)


def test_a_text_read_again_from_its_middle_ends_its_passes_there_too():
    counting = Counting(tiny_model("llama"))
    talk = Talk(ModelDrafter(counting, 67))
    talk.feed(tokens(300))
    talk.round(3, 1, 1)
    talk.back(100)
    counting.passes.clear()
    talk.feed(tokens(200, seed=1))
    talk.round(3, 1, 1)
    assert counting.passes == [CHUNK - 100, 300 - CHUNK, 1]

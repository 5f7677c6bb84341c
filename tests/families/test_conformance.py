"""What every registered family must do, whatever its network looks like."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import assert_same_logits, feed, passes
from golden.tiny import TINY, WINDOW, tiny_model
from mlx.utils import tree_flatten

from turbospark.caches.rollback import checkpoint, retain, rollback
from turbospark.errors import OptionError, RewindError
from turbospark.kernels.device import on_cpu
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.protocols import Phase
from turbospark.registry import known_types

TOKENS = np.random.default_rng(5).integers(0, 67, size=31).astype(np.int32)
OWN = [name for name in known_types() if name in TINY]


@pytest.fixture(scope="module", params=OWN)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def one_pass(model):
    return feed(model, TOKENS, [31])


def test_every_registered_type_has_a_tiny_configuration():
    assert set(known_types()) == set(TINY)


@pytest.mark.parametrize("size", [1, 5, 13])
def test_chunks_equal_one_pass(model, one_pass, size):
    assert_same_logits(model, feed(model, TOKENS, passes(31, size)), one_pass)


def test_stepwise_decode_comes_close_to_one_pass(model, one_pass):
    stepwise = feed(model, TOKENS, [1] * 31, phase=Phase.DECODE)
    np.testing.assert_allclose(stepwise, one_pass, atol=2e-5)


def test_going_back_then_replay_equals_a_straight_run(model, one_pass):
    caches = model.make_caches(64, 9)
    feed(model, TOKENS[:18], [18], caches=caches)
    point = checkpoint(caches)
    feed(model, TOKENS[18:27], [9], caches=caches)
    rollback(caches, point)
    again = feed(model, TOKENS[18:], [4, 9], caches=caches)
    assert_same_logits(model, again, one_pass[18:])


def test_rows_of_a_verify_equal_stepwise_decode(model):
    runs = []
    for sizes in ([1] * 11, [5, 1, 2, 3]):
        caches = _fed(model, 20)
        runs.append(feed(model, TOKENS[20:], sizes, phase=Phase.DECODE, caches=caches))
    assert_same_logits(model, *runs)


@pytest.mark.parametrize("keep", range(1, 7))
def test_a_verify_cut_short_leaves_what_plain_decoding_leaves(model, keep):
    plain, drafted = _fed(model, 20), _fed(model, 20)
    end = 20 + keep
    rows = feed(model, TOKENS[20:end], [1] * keep, phase=Phase.DECODE, caches=plain)
    out = _cut_verify(model, drafted, keep)
    assert_same_logits(model, np.array(out.logits)[:keep], rows)
    assert {cache.offset for cache in drafted} == {end}
    if on_cpu():
        for ours, theirs in zip(drafted, plain, strict=True):
            assert _same_content(ours.export(), theirs.export())
    runs = (
        feed(model, TOKENS[end:], [1] * (31 - end), phase=Phase.DECODE, caches=caches)
        for caches in (drafted, plain)
    )
    assert_same_logits(model, *runs)


def test_recording_changes_no_logits(model):
    runs = []
    for record in (False, True):
        out = model(
            mx.array(TOKENS[20:26]), _fed(model, 20), phase=Phase.DECODE, logits="all",
            record=record,
        )  # fmt: skip
        runs.append(np.array(out.logits))
        recurrent = {i for i, cache in enumerate(_fed(model, 1)) if cache.recurrent}
        assert set(out.row_inputs) == (recurrent if record else set())
    assert np.array_equal(*runs)


def test_exported_caches_continue_as_if_never_saved(model, one_pass):
    caches = _fed(model, 20)
    restored = model.make_caches(64, 16)
    for cache, saved in zip(restored, caches, strict=True):
        cache.restore(saved.export())
    assert {cache.offset for cache in restored} == {20}
    assert_same_logits(model, feed(model, TOKENS[20:], [11], caches=restored), one_pass[20:])


@pytest.mark.parametrize("logits", ["none", "last", "all"])
def test_hidden_rows_are_the_final_norm_of_every_row(model, logits):
    last = model.num_layers - 1
    out = model(
        mx.array(TOKENS), model.make_caches(64, 16), phase=Phase.PREFILL, logits=logits,
        taps=[last], hidden=True,
    )  # fmt: skip
    norm = model.model.norm  # a family without one gives the stream itself
    expected = rms_norm_reference(out.taps[last], None if norm is None else norm.value)
    assert out.hidden.shape == (31, 24)
    assert np.array_equal(out.hidden, expected)
    bare = model(
        mx.array(TOKENS), model.make_caches(64, 16), phase=Phase.PREFILL, logits=logits,
        hidden=True,
    )  # fmt: skip
    assert np.array_equal(bare.hidden, expected)


def test_asking_for_hidden_rows_changes_nothing_else(model, one_pass):
    caches = model.make_caches(64, 16)
    out = model(mx.array(TOKENS[:24]), caches, phase=Phase.PREFILL, logits="last", hidden=True)
    assert_same_logits(model, np.array(out.logits), one_pass[23:24])
    assert_same_logits(model, feed(model, TOKENS[24:], [7], caches=caches), one_pass[24:])
    assert model(mx.array(TOKENS[:3]), model.make_caches(64, 16), phase=Phase.DECODE).hidden is None


def test_a_rewind_past_the_budget_moves_nothing(model):
    for cache in _fed(model, 31, slack=9):
        with pytest.raises(RewindError, match="cannot rewind by"):
            cache.rewind(cache.max_rewind() + 1)
        assert cache.offset == 31


def test_forks_do_not_see_each_other(model, one_pass):
    caches = _fed(model, 20)
    forks = [cache.fork() for cache in caches]
    feed(model, TOKENS[:11], [11], caches=forks)
    assert_same_logits(model, feed(model, TOKENS[20:], [11], caches=caches), one_pass[20:])


def test_every_cache_stands_behind_the_tokens_fed(model):
    assert {cache.offset for cache in _fed(model, 23)} == {23}


def test_last_logits_are_the_last_row_of_all(model, one_pass):
    caches = _fed(model, 24)
    out = model(mx.array(TOKENS[24:]), caches, phase=Phase.PREFILL, logits="last")
    assert out.logits.dtype == mx.float32
    assert_same_logits(model, np.array(out.logits), one_pass[-1:])


def test_a_pass_without_logits_fills_the_caches_alike(model, one_pass):
    caches = model.make_caches(64, 16)
    out = model(mx.array(TOKENS[:24]), caches, phase=Phase.PREFILL, logits="none")
    assert out.logits is None
    assert_same_logits(model, feed(model, TOKENS[24:], [7], caches=caches), one_pass[24:])


def test_taps_give_the_stream_and_change_nothing(model, one_pass):
    last = model.num_layers - 1
    out = model(
        mx.array(TOKENS), model.make_caches(64, 16), phase=Phase.PREFILL, logits="last",
        taps=[0, last],
    )  # fmt: skip
    assert sorted(out.taps) == [0, last]
    assert out.taps[0].shape == out.taps[last].shape == (31, 24)
    assert_same_logits(model, np.array(out.logits), one_pass[-1:])
    assert_same_logits(model, np.array(model.head(out.taps[last], Phase.PREFILL)), one_pass)


def test_a_tap_that_names_no_layer_is_refused(model):
    with pytest.raises(OptionError, match="names no layer"):
        model(
            mx.array(TOKENS), model.make_caches(64, 16), phase=Phase.PREFILL,
            taps=[model.num_layers],
        )  # fmt: skip


def test_sanitize_twice_is_sanitize_once(model):
    weights = dict(tree_flatten(model.parameters()))
    once = model.sanitize(weights)
    twice = model.sanitize(once)
    assert once.keys() == twice.keys() == weights.keys()
    assert all(once[name] is twice[name] for name in once)


def test_an_unknown_tensor_stays_for_the_loader_to_report(model):
    strange = {"model.layers.0.self_attn.mystery.weight": mx.zeros((2, 2))}
    assert model.sanitize(strange).keys() == strange.keys()


WINDOWED = {
    "gpt_oss": {"num_hidden_layers": 1},
    "mistral": {"num_hidden_layers": 1},
    "mixtral": {"num_hidden_layers": 1},
    "muse_glimmer": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "qwen2": {"num_hidden_layers": 1, "max_window_layers": 0},
    "qwen3": {"num_hidden_layers": 1, "max_window_layers": 0},
    "qwen3_moe": {"num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": WINDOW},
    "gemma3_text": {"num_hidden_layers": 1},
    "spark2_5": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("size", [1, 5, 31])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_a_window_ends_where_it_should(name, size, phase):
    model = tiny_model(name, **WINDOWED[name])
    before = feed(model, TOKENS, passes(31, size), phase=phase)
    changed = TOKENS.copy()
    changed[10] = (changed[10] + 1) % 67
    after = feed(model, changed, passes(31, size), phase=phase)
    moved = np.flatnonzero((before != after).any(axis=1))
    assert moved.tolist() == list(range(10, 10 + WINDOW))


def _same_content(one, other):
    """Whether exported arrays are equal, but for rows that only one ring still keeps."""
    assert one.keys() == other.keys()
    pairs = [(np.array(one[name]), np.array(other[name])) for name in one if name != "span"]
    if "k" in one:
        count = min(one["k"].shape[1], other["k"].shape[1])
        pairs = [(a[:, -count:], b[:, -count:]) for a, b in pairs]
    return all(np.array_equal(a, b) for a, b in pairs)


def _cut_verify(model, caches, keep):
    """Verify six rows of which `keep` are true, and take the others back."""
    rows = TOKENS[20:26].copy()
    rows[keep:] = (rows[keep:] + 1) % 67
    point = checkpoint(caches)
    out = model(mx.array(rows), caches, phase=Phase.DECODE, logits="all", record=True)
    retain(caches, point, keep, out.row_inputs)
    return out


def _fed(model, count, slack=16):
    caches = model.make_caches(64, slack)
    feed(model, TOKENS[:count], [count], caches=caches)
    return caches

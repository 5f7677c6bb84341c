"""What every drafter's state must do, whatever is drafted and kept on the way."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speculation.talk import CONTEXT, PROBE, VOCAB, WIDTH, Talk, drafters, tokens

from turbospark.caches.kv import KVCache
from turbospark.caches.ring import RingCache
from turbospark.errors import CheckpointError, NonFiniteError, ProducerError
from turbospark.speculation.dflash import DFlashState

DRAFTERS = drafters()
EXACT = [DRAFTERS[name] for name in ("mtp", "mtp of experts", "dflash2", "dflash1")]
FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@pytest.fixture(params=sorted(DRAFTERS), scope="module")
def drafter(request):
    return DRAFTERS[request.param]


def assert_same_opinions(talk, reference=None):
    reference = talk.fresh() if reference is None else reference
    if talk.drafter in EXACT:
        assert np.array_equal(talk.opinions(), reference.opinions())
    else:  # rows of prefill and of decode sum up in other orders
        np.testing.assert_allclose(talk.opinions(), reference.opinions(), atol=2e-4)


@pytest.mark.parametrize("size", [1, 5, 64, 71])
def test_any_chunking_equals_one_pass(drafter, size):
    text, talk = tokens(150), Talk(drafter)
    for start in range(0, len(text), size):
        talk.feed(text[start : start + size])
    assert_same_opinions(talk)


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_round_leaves_nothing_behind(drafter, count, keep):
    talk = Talk(drafter)
    talk.feed(tokens(40))
    for anchor in (7, 21):
        talk.round(anchor, count, min(keep, count + 1))
        assert_same_opinions(talk)


def test_a_broken_off_round_is_as_never_drafted(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(33))
    before = talk.opinions()
    if drafter.block_passes:
        drafter.block(talk.state, talk.ids, 3, 2)
    else:
        drafter.step(talk.state, 3, 32)
        drafter.step(talk.state, 4, 33)
    talk.state.rewind(33)
    if not drafter.block_passes:
        talk.feed([9])  # another token than the anchor that was drafted from
        talk.back(33)
        talk.state.rewind(0)
        talk = talk.fresh()
    assert np.array_equal(talk.opinions(), before)


def test_another_token_than_the_anchor_may_follow(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(33))
    talk.round(3, 2, 1)
    talk.back(33)
    talk.feed([9, 10])
    assert_same_opinions(talk)


@pytest.mark.parametrize("keep", [0, 1, 30, 97, 98, 99, 100, 107, 134, 149, 150])
def test_going_back_equals_never_having_been_there(drafter, keep):
    talk = Talk(drafter)
    talk.feed(tokens(100))
    talk.feed(tokens(50, seed=1))
    position = talk.back(keep)
    assert position <= keep
    talk.feed(tokens(11, seed=2))
    assert_same_opinions(talk)


def test_wherever_a_state_says_it_can_follow_from_it_can_stand(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(150))
    for keep in range(151):
        state = talk.state.fork()
        place = state.resume_at(keep)
        assert 0 <= place <= keep
        state.rewind(place)


@pytest.mark.parametrize("place", [1, 60, 100])
def test_a_mark_leads_back_exactly(drafter, place):
    talk = Talk(drafter)
    talk.feed(tokens(place))
    mark = talk.state.mark()
    talk.round(8, 3, 2)
    talk.feed(tokens(180, seed=1))
    assert talk.back(place, mark) == place
    talk.feed(tokens(5, seed=2))
    assert_same_opinions(talk)
    talk.feed(tokens(90, seed=3))
    assert talk.back(place, mark) == place  # it serves again
    talk.feed(tokens(4, seed=4))
    assert_same_opinions(talk)


@pytest.mark.parametrize("windows", [[None, None], [9, None], [9, 9]])
def test_a_mark_holds_rows_only_where_some_are_overwritten(windows):
    sizes = (2, 3, CONTEXT)
    state = DFlashState(
        lambda: [RingCache(*sizes, window, 5) if window else KVCache(*sizes) for window in windows],
        WIDTH,
    )
    assert (state.mark() is None) == (not any(windows))


def test_forks_do_not_see_each_other(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(130))
    talk.round(5, 3, 2)
    twin = talk.fork()
    talk.feed(tokens(20, seed=1))
    twin.round(6, 2, 3)
    twin.feed(tokens(13, seed=2))
    talk.round(7, 3, 1)
    assert_same_opinions(talk)
    assert_same_opinions(twin)


@pytest.mark.parametrize("count", [0, 1, 2, 90, 200])
def test_a_restored_state_goes_on_as_the_saved_one(drafter, count):
    talk = Talk(drafter)
    if count:
        talk.feed(tokens(count))
        talk.round(9, 3, 2)
    twin = talk.saved()
    for each in (talk, twin):
        each.feed(tokens(6, seed=1))
        each.round(2, 2, 2)
    assert_same_opinions(twin, talk)


def test_a_state_saved_right_after_a_draft_is_the_one_before(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(70))
    if not drafter.block_passes:
        drafter.step(talk.state, 4, 69)
        drafter.step(talk.state, 5, 70)
    twin = talk.saved()
    twin.feed([4, 6])
    assert_same_opinions(twin)


def test_arrays_of_another_state_are_refused_and_change_nothing(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(50))
    before, arrays = talk.opinions(), talk.state.export()
    for name in arrays:
        broken = {key: value for key, value in arrays.items() if key != name}
        with pytest.raises(CheckpointError):
            talk.state.restore(broken)
        if not arrays[name].size or (drafter.name == "model" and name == "text.ids"):
            continue  # as before, and a text that the draft model may read anew
        with pytest.raises(CheckpointError):
            talk.state.restore({**arrays, name: arrays[name][..., :0]})
    with pytest.raises(CheckpointError):
        talk.state.restore({**arrays, "cache9.span": next(iter(arrays.values()))})
    assert np.array_equal(talk.opinions(), before)


def test_a_gap_is_refused_by_name(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(20))
    if drafter.name == "model":
        drafter.observe(talk.state, tokens(30), 25, None)  # it reads the gap up
        assert talk.state.cursor == 29
        return
    talk.ids = tokens(30)
    with pytest.raises(ProducerError, match=r"20 tokens.*from 25 on"):
        drafter.observe(talk.state, talk.ids, 25, talk.output(25))
    assert talk.state.resume_at(30) == 20


def test_rows_before_the_end_are_refused(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(20))
    with pytest.raises(ProducerError, match=r"20 tokens.*from 12 on"):
        drafter.observe(talk.state, talk.ids, 12, talk.output(12))


def test_bytes_are_counted(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(100))
    talk.round(1, 1, 1)
    assert talk.state.nbytes > 1000
    assert drafter.new_state(CONTEXT).nbytes == 0


@pytest.mark.parametrize("name", ["mtp", "dflash2", "dflash1"])  # those that read the target
def test_what_is_not_finite_is_refused_by_name(name):
    drafter = DRAFTERS[name]
    talk = Talk(drafter)
    talk.feed(tokens(7))
    talk.ids.append(3)
    output = talk.output(7)
    bad = output.hidden if drafter.hidden else output.taps[drafter.taps[-1]]
    bad[0, 5] = np.inf
    drafter.observe(talk.state, talk.ids, 7, output)
    with pytest.raises(NonFiniteError, match="at position 7 holds NaN or infinity"):
        talk.opinions()


OPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 90)),
    st.tuples(st.just("round"), st.integers(1, 4), st.integers(1, 5)),
    st.tuples(st.just("back"), st.floats(0, 1)),
    st.tuples(st.just("fork")),
    st.tuples(st.just("save")),
    st.tuples(st.just("mark")),
    st.tuples(st.just("return"), st.integers(0, 3)),
)


@FEW
@given(ops=st.lists(OPS, min_size=2, max_size=9), name=st.sampled_from(sorted(DRAFTERS)))
def test_whatever_happens_a_state_equals_a_fresh_one(ops, name):
    talk, marks = Talk(DRAFTERS[name]), []
    talk.feed(tokens(9))
    for seed, (op, *values) in enumerate(ops):
        more = tokens(90, seed=seed)
        if op == "feed" and len(talk.ids) < CONTEXT - 200:
            talk.feed(more[: values[0]])
        elif op == "round":
            talk.round(more[0], values[0], min(values[1], values[0] + 1))
        elif op == "back":
            talk.back(int(values[0] * len(talk.ids)))
            marks = [kept for kept in marks if kept[0] <= len(talk.ids)]
            talk.feed(more[:2])
        elif op == "fork":
            talk, other = talk.fork(), talk
            other.feed(more[:3])
        elif op == "save":
            talk = talk.saved()
        elif op == "mark":
            marks.append((len(talk.ids), talk.state.mark()))
        elif op == "return" and marks:
            place, mark = marks[values[0] % len(marks)]
            talk.back(place, mark)
            assert len(talk.ids) == place
            marks = [kept for kept in marks if kept[0] <= place]
            talk.feed(more[:1])
    assert_same_opinions(talk)


def test_block_drafters_give_exactly_what_is_asked_for():
    for name in ("dflash2", "dflash1"):
        talk = Talk(DRAFTERS[name])
        talk.feed(tokens(30))
        most = DRAFTERS[name].max_block
        whole = DRAFTERS[name].block(talk.state, talk.ids, 4, most)
        assert len(whole) == most
        for count in range(1, most):
            assert DRAFTERS[name].block(talk.state, talk.ids, 4, count) == whole[:count]
        for count in (0, most + 1):
            with pytest.raises(ProducerError, match=f"1 to {most}"):
                DRAFTERS[name].block(talk.state, talk.ids, 4, count)


def test_a_draft_step_off_the_cursor_is_refused(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(10))
    if drafter.block_passes:
        with pytest.raises(ProducerError, match="no draft step"):
            drafter.step(talk.state, 1, 9)
        return
    for position in (8, 10):
        with pytest.raises(ProducerError, match="next"):
            drafter.step(talk.state, 1, position)
    drafter.step(talk.state, 1, 9)
    with pytest.raises(ProducerError, match="no block pass"):
        drafter.block(talk.state, talk.ids, 1, 1)


def test_a_primed_state_is_as_one_that_is_not(drafter):
    talk = Talk(drafter)
    talk.feed(tokens(29))
    drafter.prime(talk.state, talk.ids, PROBE[0])
    talk.feed([PROBE[0] % VOCAB, 4])
    assert_same_opinions(talk)
    with pytest.raises(ProducerError, match="31 tokens"):
        drafter.prime(talk.state, talk.ids[:-1], 4)


@pytest.mark.parametrize("name", ["mtp", "llama", "windowed", "recurrent"])
def test_rows_that_come_without_a_rewind_replace_chained_ones(name):
    drafter = DRAFTERS[name]
    for anchor in (6, 7):
        talk = Talk(drafter)
        talk.feed(tokens(24))
        drafter.step(talk.state, 6, 23)
        drafter.step(talk.state, 8, 24)
        talk.feed([anchor, 8, 3])
        assert_same_opinions(talk)

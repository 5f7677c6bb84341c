"""The record of fed ids: its properties against a plain list."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from turbospark.sessions.fed_ids import FedIds

IDS = st.lists(st.integers(0, 2), max_size=8)


def fed(*ids: int) -> FedIds:
    record = FedIds()
    record.record(ids, 0)
    return record


def test_1_a_prompt_that_continues_shares_everything() -> None:
    assert fed(1, 2, 3).common_prefix([1, 2, 3, 4]) == 3


def test_2_3_a_divergence_truncates_and_at_token_0_shares_nothing() -> None:
    assert fed(1, 2, 3, 4).common_prefix([1, 2, 9, 9, 9]) == 2
    assert fed(1, 2).common_prefix([9, 2, 3]) == 0


def test_4_the_last_token_is_never_shared() -> None:
    assert fed(1, 2, 3).common_prefix([1, 2, 3]) == 2
    assert fed(1, 2, 3).common_prefix([1, 2]) == 1
    assert fed(1).common_prefix([1]) == 0


def test_5_empty_records_and_prompts_share_nothing() -> None:
    assert fed().common_prefix([1]) == 0
    assert fed(1).common_prefix([]) == 0


def test_6_taint_lasts_until_clear() -> None:
    record = fed(1, 2)
    record.taint()
    assert record.common_prefix([1, 2, 3]) == 0
    record.record([5], 2)
    assert record.common_prefix([1, 2, 5, 6]) == 0
    record.clear()
    record.record([1], 0)
    assert record.common_prefix([1, 2]) == 1


def test_6_the_first_reason_of_a_taint_stands() -> None:
    record = fed(1)
    assert record.taint_reason == ""
    record.taint("first")
    record.taint("second")
    assert record.taint_reason == "first"
    record.clear()
    assert not record.tainted


def test_a_copy_goes_its_own_way() -> None:
    record = fed(1, 2)
    twin = record.copy()
    twin.record([3], 2)
    record.taint()
    assert record.ids == [1, 2]
    assert twin.ids == [1, 2, 3]
    assert not twin.tainted
    assert record.copy().tainted


def test_7_a_gap_empties_and_taints() -> None:
    record = fed(1, 2)
    record.record([9], 3)
    assert len(record) == 0
    assert record.tainted


def test_8_an_earlier_position_replaces_the_tail() -> None:
    record = fed(1, 2, 3, 4)
    record.record([8, 9], 1)
    assert record.ids == [1, 8, 9]


def test_9_rewind_shortens_and_a_larger_one_does_nothing() -> None:
    record = fed(1, 2, 3)
    record.rewind_to(7)
    assert record.ids == [1, 2, 3]
    record.rewind_to(1)
    assert record.ids == [1]


def test_the_record_keeps_no_reference_to_what_it_was_given() -> None:
    ids = [1, 2]
    record = FedIds()
    record.record(ids, 0)
    ids.append(3)
    record.ids.append(4)
    assert record.ids == [1, 2]


@given(IDS, IDS)
def test_10_the_prefix_is_bounded_equal_and_maximal(ids: list[int], prompt: list[int]) -> None:
    found = fed(*ids).common_prefix(prompt)
    bound = max(min(len(ids), len(prompt) - 1), 0)
    assert found <= bound
    assert prompt[:found] == ids[:found]
    assert found == bound or prompt[found] != ids[found]


@given(IDS, IDS, st.integers(0, 9))
def test_10_a_rewind_bounds_the_common_prefix(ids: list[int], prompt: list[int], keep: int) -> None:
    record = fed(*ids)
    before = record.common_prefix(prompt)
    record.rewind_to(keep)
    assert record.common_prefix(prompt) == min(before, keep)


class FedIdsMachine(RuleBasedStateMachine):
    """Any order of operations, against a list and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.record = FedIds()
        self.ids: list[int] = []
        self.tainted = False

    @rule(tokens=IDS, back=st.integers(-2, 4))
    def feed(self, tokens: list[int], back: int) -> None:
        position = max(len(self.ids) - back, 0)
        self.record.record(tokens, position)
        if position > len(self.ids):
            self.ids, self.tainted = [], True
        else:
            self.ids = [*self.ids[:position], *tokens]

    @rule(keep=st.integers(0, 12))
    def rewind(self, keep: int) -> None:
        self.record.rewind_to(keep)
        self.ids = self.ids[:keep]

    @rule()
    def taint(self) -> None:
        self.record.taint()
        self.tainted = True

    @rule()
    def clear(self) -> None:
        self.record.clear()
        self.ids, self.tainted = [], False

    @invariant()
    def agrees(self) -> None:
        assert self.record.ids == list(self.record) == self.ids
        assert len(self.record) == len(self.ids)
        assert self.record[1:3] == self.ids[1:3]
        assert self.record.tainted == self.tainted
        expected = 0 if self.tainted else len(self.ids)
        assert self.record.common_prefix([*self.ids, 9]) == expected


Test10AnyOperationsAgreeWithAList = FedIdsMachine.TestCase

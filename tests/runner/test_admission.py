"""What is refused before any state moves."""

import numpy as np
import pytest

from turbospark.errors import ContextLengthError, OptionError, PromptError
from turbospark.runner.admission import check_budget, check_ids


def test_ids_of_any_integer_kind_are_taken() -> None:
    assert check_ids(np.array([3, 0, 6], dtype=np.int64), 7) == [3, 0, 6]
    assert all(type(token) is int for token in check_ids(np.array([1, 2]), 7))


@pytest.mark.parametrize("token", [7, -1, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(PromptError, match=rf"token 1 is {token}; ids run from 0 to 6"):
        check_ids([0, token], 7)


@pytest.mark.parametrize("token", [1.0, "1", None, True])
def test_what_is_no_id_is_refused(token: object) -> None:
    with pytest.raises(PromptError, match="item 0"):
        check_ids([token], 7)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match="empty"):
        check_ids([], 7)


def test_a_budget_that_fits_exactly_is_admitted() -> None:
    assert check_budget(3, 5, 8) == 5
    with pytest.raises(ContextLengthError, match="prompt of 4 tokens and max_tokens=5 exceed"):
        check_budget(4, 5, 8)


def test_no_limit_is_what_fits() -> None:
    assert check_budget(3, -1, 8) == 5
    with pytest.raises(ContextLengthError, match="0 tokens are left"):
        check_budget(8, -1, 8)


def test_a_budget_of_0_is_refused() -> None:
    with pytest.raises(OptionError, match="max_tokens=0"):
        check_budget(3, 0, 8)

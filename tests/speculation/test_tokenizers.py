"""Draft models whose tokens are not the target's are refused by what differs."""

from dataclasses import dataclass, field, replace

import pytest

from turbospark.errors import OptionError
from turbospark.speculation.tokenizers import check_same_tokens


@dataclass(frozen=True)
class Words:
    """A vocabulary of numbered words."""

    vocab_size: int = 9000
    bos_id: int | None = 1
    eos_ids: frozenset[int] = frozenset({2})
    special_ids: frozenset[int] = frozenset({1, 2})
    odd: dict[int, str] = field(default_factory=dict)
    cut: int = 3

    def token_text(self, token):
        return self.odd.get(token, f"w{token}")

    def encode(self, text, add_special_tokens=True):
        return [len(text[at : at + self.cut]) for at in range(0, len(text), self.cut)]


def test_equal_vocabularies_pass():
    check_same_tokens(Words(), Words())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 9001}, "it has 9001 tokens, the model's has 9000"),
        ({"bos_id": None}, "its bos_id is None, the model's is 1"),
        ({"eos_ids": frozenset({2, 3})}, r"its eos_ids is \[2, 3\], the model's is \[2\]"),
        ({"special_ids": frozenset({1, 2, 7})}, "token 7 is special for only one of them"),
        ({"odd": {0: "x"}}, "token 0 is 'x', the model's is 'w0'"),
        ({"odd": {8999: "x"}}, "token 8999 is 'x'"),
        ({"odd": dict.fromkeys(range(4000, 4002), "x")}, "token 400[01] is 'x'"),
        ({"cut": 4}, "it splits 'The quick brown fox"),
    ],
)
def test_a_difference_is_named(changes, message):
    with pytest.raises(OptionError, match=f"tokenizer is not the model's own: .*{message}"):
        check_same_tokens(Words(), replace(Words(), **changes))

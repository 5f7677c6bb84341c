"""The ids behind a text that a stop string cut."""

import pytest

from turbospark.runner.transcript import shown_ids
from turbospark.testing import ByteTokenizer

PAIRS = {300: b"ab", 301: b"b\xc3"}


class Pairs(ByteTokenizer):
    """Has tokens of two bytes where it decodes, and never encodes so."""

    def decode(self, ids, skip_special_tokens=True):
        plain = [part for token in ids for part in PAIRS.get(token, [token])]
        return super().decode(plain, skip_special_tokens)

    def detokenizer(self):
        inner = super().detokenizer()
        add = inner.add
        inner.add = lambda token: "".join(map(add, PAIRS.get(token, [token])))
        return inner


@pytest.mark.parametrize(
    ("tokens", "shown", "expected"),
    [
        ([300, 99, 300, 100], "abcab", [300, 99, 300]),
        ([300, 99, 300, 100], "abca", [300, 99, 97]),
        ([300, 99], "a", [97]),
        ([300, 257, 99, 257], "abc", [300, 257, 99]),
        ([300, *"é".encode(), 33], "abé", [300, *"é".encode()]),
        ([300, "é".encode()[0], 33], "ab", [300]),
        ([300, 99], "", []),
        ([97, 301, 33], "ab", [97, 98]),
        ([97, 301, 0xA9, 33], "abé", [97, 301, 0xA9]),
    ],
)
def test_the_tokens_within_are_kept_and_the_rest_is_encoded(tokens, shown, expected):
    assert shown_ids(tokens, shown, Pairs()) == expected

"""Finding added tokens in a text, for back ends whose library does not do it."""

import re
from collections.abc import Iterable, Iterator

from turbospark.tokenizer.vocabulary import AddedToken


class AddedTokens:
    """Splits a text at added tokens: leftmost first, then longest."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_text = {token.content: token for token in tokens if token.content}
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        firsts = "".join(map(re.escape, self._lengths))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str, *, parse_special: bool) -> Iterator[str | int]:
        """Yield stretches of plain text (never empty) and ids of added tokens, in order."""
        start = position = 0
        while self._first and (found := self._first.search(text, position)):
            token = self._match(text, found.start(), parse_special)
            if token is None:
                position = found.start() + 1
                continue
            plain = text[start : found.start()]
            plain = plain.rstrip() if token.lstrip else plain
            if plain:
                yield plain
            yield token.id
            start = found.start() + len(token.content)
            if token.rstrip:
                start = len(text) - len(text[start:].lstrip())
            position = start
        if start < len(text):
            yield text[start:]

    def _match(self, text: str, start: int, parse_special: bool) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._by_text.get(text[start : start + length])
            if token is None or (token.special and not parse_special):
                continue
            if token.single_word and _touches_word(text, start, start + length):
                continue
            return token
        return None


def _touches_word(text: str, start: int, end: int) -> bool:
    around = text[max(start - 1, 0) : start] + text[end : end + 1]
    return re.search(r"\w", around) is not None

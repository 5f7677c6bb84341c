"""Byte-pair encoding written anew and slowly, to hold the real back ends against."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

CORPUS = (
    "The quick brown fox jumps over the lazy dog, then it's done and they're gone.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy; ď a ť jsou měkké.",
    "日本語のテキストを短く切る。日本の本",
    "مرحبا بالعالم هذا نص عربي",
    "नमस्ते दुनिया हिन्दी पाठ",
    "def f(x):\n    return x  +  1\n\n\nprint(f(1234567))\n\t\t# end",
    "émigré naïve Ⅷ ² ½ 12 345 678",
)

Pair = tuple[str, str]


def learn_merges(words: Iterable[Sequence[str]], count: int) -> list[Pair]:
    """The `count` most frequent pairs, one after the other, ties by spelling."""
    texts = [list(word) for word in words]
    merges: list[Pair] = []
    for _ in range(count):
        pairs = Counter(pair for word in texts for pair in pairwise(word))
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        texts = [_merged(word, best) for word in texts]
    return merges


def merge_by_rank(symbols: Sequence[str], merges: Sequence[Pair]) -> list[str]:
    """Apply merges, the strongest that fits first, each to all its places from the left."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    word = list(symbols)
    while True:
        fitting = [pair for pair in pairwise(word) if pair in ranks]
        if not fitting:
            return word
        word = _merged(word, min(fitting, key=ranks.__getitem__))


def merge_by_score(symbols: Sequence[str], scores: Mapping[str, float]) -> list[str]:
    """Join the neighbours whose union scores highest, the leftmost of equals, while any do."""
    word = list(symbols)
    while True:
        joined = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(word))
            if left + right in scores
        ]
        if not joined:
            return word
        _, place = min(joined)
        word[place : place + 2] = ["".join(word[place : place + 2])]


def split_at(text: str, tokens: Iterable[str]) -> list[tuple[str, bool]]:
    """Cut a text at tokens, leftmost and longest first; (stretch, is a token)."""
    by_length = sorted(tokens, key=len, reverse=True)
    parts: list[tuple[str, bool]] = []
    plain, place = "", 0
    while place < len(text):
        token = next((t for t in by_length if text.startswith(t, place)), None)
        if token is None:
            plain += text[place]
            place += 1
            continue
        parts += [(plain, False)] if plain else []
        parts.append((token, True))
        plain, place = "", place + len(token)
    return parts + ([(plain, False)] if plain else [])


def is_space(character: str) -> bool:
    return character.isspace() and character not in "\x1c\x1d\x1e\x1f"


def is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] == "L"


def is_number(character: str) -> bool:
    return unicodedata.category(character)[0] == "N"


def is_sign(character: str) -> bool:
    return not (is_space(character) or is_letter(character) or is_number(character))


def cut_as_gpt2(text: str) -> list[str]:
    """Contractions, then words, numbers and signs with the space before them, then spaces."""
    pieces: list[str] = []
    while text:
        size = _contraction(text, {"s", "t", "re", "ve", "m", "ll", "d"}, str)
        start = 1 if text[0] == " " else 0
        for kind in (is_letter, is_number, is_sign):
            size = size or _run(text, kind, start)
        size = size or _spaces(text)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def cut_as_llama3(text: str, digits: int = 3) -> list[str]:
    """As Llama 3 does; with one digit a piece as Qwen 2 does."""
    pieces: list[str] = []
    while text:
        size = _contraction(text, {"s", "t", "re", "ve", "m", "ll", "d"}, str.lower)
        lead = 1 if text[0] not in "\r\n" and not is_letter(text[0]) else 0
        lead = 0 if is_number(text[0]) else lead
        size = size or _run(text, is_letter, lead)
        size = size or min(_run(text, is_number, 0), digits)
        if not size and (size := _run(text, is_sign, 1 if text[0] == " " else 0)):
            size += _run(text[size:], lambda c: c in "\r\n", 0)
        if not size:
            spaces = text[: _run(text, is_space, 0)]
            last_break = max(spaces.rfind("\r"), spaces.rfind("\n"))
            size = last_break + 1 or _spaces(text)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def _contraction(text: str, endings: set[str], fold: Callable[[str], str]) -> int:
    if text[0] != "'":
        return 0
    return next((n + 1 for n in (1, 2) if fold(text[1 : n + 1]) in endings), 0)


def _run(text: str, kind: Callable[[str], bool], start: int) -> int:
    end = start
    while end < len(text) and kind(text[end]):
        end += 1
    return end if end > start else 0


def _spaces(text: str) -> int:
    """A run of spaces, but for its last one when a word follows."""
    size = _run(text, is_space, 0)
    return size - 1 if size > 1 and size < len(text) else size


def _merged(word: list[str], pair: Pair) -> list[str]:
    out: list[str] = []
    place = 0
    while place < len(word):
        if tuple(word[place : place + 2]) == pair:
            out.append("".join(pair))
            place += 2
        else:
            out.append(word[place])
            place += 1
    return out

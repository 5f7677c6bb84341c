"""Token ids to text, one id at a time.

Decoding is a sum of bytes: each token adds its own, and UTF-8 is read across the seams. A
character is given out as soon as its last byte is there, never earlier. Bytes that are not UTF-8
become U+FFFD, one for each maximal ill-formed run, as in `bytes.decode("utf-8", "replace")`.
"""

import codecs
from collections.abc import Iterable

from turbospark.errors import PromptError
from turbospark.tokenizer.vocabulary import NO_STRIP, STRIP_ALL, Vocabulary

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of a growing list of ids.

    Whatever the ids, the parts that `add` and `finish` return join to `Tokenizer.decode(ids)`.
    It holds at most three bytes, so an id costs the same at any length.
    """

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], size: int) -> None:
        """Start an empty text.

        Args:
            vocabulary: gives the bytes of an id.
            skipped: ids that add nothing.
            size: ids from the vocabulary's size up to this one add nothing (padding rows of the
                model's embedding); others are refused.
        """
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._size = size
        self._utf8 = _utf8_decoder("replace")
        self._leading = vocabulary.leading_spaces

    def add(self, token: int) -> str:
        """Take one id and return the text that became certain, often empty or one word.

        Raises:
            PromptError: the id is outside the vocabulary; the text so far is unchanged.
        """
        return self._strip(self._utf8.decode(self._bytes(token)))

    def finish(self) -> str:
        """Return what is left, a half character as U+FFFD, and start an empty text."""
        rest = self._strip(self._utf8.decode(b"", True))
        self._utf8.reset()
        self._leading = self._vocabulary.leading_spaces
        return rest

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens` from the start; nothing of earlier `add` calls is in it."""
        data = b"".join(map(self._bytes, tokens))
        self._leading = self._vocabulary.leading_spaces
        return self._strip(data.decode("utf-8", "replace"))

    def _bytes(self, token: int) -> bytes:
        if token in self._skipped:
            return b""
        if not 0 <= token < self._vocabulary.size:
            return self._padding(token)
        return self._vocabulary.token_bytes(token)

    def _padding(self, token: int) -> bytes:
        if 0 <= token < self._size:
            return b""
        raise PromptError(
            f"token id {token} is outside the vocabulary of {self._vocabulary.source}, "
            f"which has ids 0 to {self._vocabulary.size - 1}"
        )

    def _strip(self, text: str) -> str:
        if self._leading == NO_STRIP or not text:
            return text
        if self._leading == STRIP_ALL:
            text = text.lstrip(" ")
            if text:
                self._leading = NO_STRIP
            return text
        self._leading = NO_STRIP
        return text.removeprefix(" ")

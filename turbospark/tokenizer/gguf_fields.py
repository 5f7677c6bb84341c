"""Typed reading of a GGUF file's `tokenizer.ggml.*` metadata."""

import math
from collections.abc import Mapping
from typing import Any

from turbospark.errors import TokenizerError
from turbospark.tokenizer.sentencepiece_model import PIECE_TYPES
from turbospark.tokenizer.shapes import is_list, is_sequence, is_utf8

KEY = "tokenizer.ggml."


class GGUFFields:
    """The metadata of one file; every reader raises TokenizerError naming file and key."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self.source = source

    def fail(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.source}: {KEY}{key} {problem}")

    def text(self, key: str) -> str:
        value = self._metadata.get(KEY + key)
        if not isinstance(value, str):
            raise self.fail(key, "is missing" if value is None else "is not text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(KEY + key)
        if value is None:
            return default
        if not isinstance(value, bool) and value not in (0, 1):
            raise self.fail(key, f"is {value!r}, neither true nor false")
        return bool(value)

    def token(self, key: str, size: int) -> int | None:
        value = self._metadata.get(KEY + key)
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise self.fail(key, f"is {value!r}, not a token id")
        if not 0 <= int(value) < size:
            raise self.fail(key, f"is {int(value)}, outside the {size} tokens of the vocabulary")
        return int(value)

    def items(self, key: str) -> list[Any]:
        value = self._metadata.get(KEY + key)
        if value is None:
            raise self.fail(key, "is missing")
        listed: Any = value.tolist() if hasattr(value, "tolist") else value
        if not is_sequence(listed):
            raise self.fail(key, f"is {type(value).__name__}, not a list")
        return listed if is_list(listed) else list(listed)

    def texts(self, key: str) -> list[str]:
        values = self.items(key)
        if all(type(value) is str for value in values) and is_utf8("".join(values)):
            return values
        return [self._as_text(key, index, value) for index, value in enumerate(values)]

    def _as_text(self, key: str, index: int, value: Any) -> str:
        try:
            text = value.decode() if isinstance(value, bytes) else str.__str__(value)
            text.encode()
            return text
        except (UnicodeError, TypeError):
            raise self.fail(key, f"holds at {index} something that is no UTF-8 text") from None

    def tokens(self) -> list[str]:
        tokens = self.texts("tokens")
        if not tokens:
            raise self.fail("tokens", "is empty")
        return tokens

    def types(self, size: int) -> list[int]:
        if self._metadata.get(KEY + "token_type") is None:
            raise self.fail("token_type", "is missing")
        types = self.items("token_type")
        if len(types) != size:
            raise self.fail("token_type", f"has {len(types)} entries for {size} tokens")
        try:
            unknown = set(types) - PIECE_TYPES
        except TypeError:
            unknown = {"a list"}
        if unknown:
            raise self.fail("token_type", f"holds {sorted(map(str, unknown))[0]}, not 1 to 6")
        return list(map(int, types))

    def scores(self, size: int) -> list[float]:
        scores = self.items("scores")
        if len(scores) != size:
            raise self.fail("scores", f"has {len(scores)} entries for {size} tokens")
        try:
            if all(map(math.isfinite, scores)) and all(abs(score) < 3e38 for score in scores):
                return scores
        except TypeError:
            pass
        raise self.fail("scores", "holds something that is no finite 32-bit number")

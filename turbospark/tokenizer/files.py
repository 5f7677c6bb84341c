"""The JSON files of a checkpoint folder that speak about tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbospark.errors import TokenizerError
from turbospark.tokenizer.shapes import is_list, is_object, is_utf8
from turbospark.tokenizer.vocabulary import AddedToken

_NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_MAX_IDS = 1 << 24
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one.

    Raises:
        TokenizerError: the file is damaged, or holds something else; names it.
    """
    if not path.exists():
        return {}
    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}") from None
    if not is_object(value):
        raise TokenizerError(f"{path} holds {type(value).__name__} where an object belongs")
    return value


class TokenizerFiles:
    """The JSON files of a folder that speak about tokens."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self.settings_path = folder / "tokenizer_config.json"
        self.settings = read_json(self.settings_path)
        self._map_path = folder / "special_tokens_map.json"
        self._map = read_json(self._map_path)

    def fail(self, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.settings_path}: {problem}")

    def flag(self, key: str) -> bool | None:
        value = self.settings.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}, neither true nor false")
        return value

    def named(self) -> dict[str, str]:
        """The texts of the special tokens that have a name."""
        found: dict[str, str] = {}
        for path, values in ((self._map_path, self._map), (self.settings_path, self.settings)):
            for name in _NAMED:
                if values.get(name) is not None:
                    found[name] = _token_text(values[name], name, path)
        return found

    def extra_special(self) -> set[str]:
        """Texts of special tokens without a name."""
        found: set[str] = set()
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value: Any = self.settings.get(key)
            listed = list(value.values()) if is_object(value) else [] if value is None else value
            if not is_list(listed):
                raise self.fail(f"{key} is {type(value).__name__}, not a list")
            found.update(_token_text(item, key, self.settings_path) for item in listed)
        return found

    def added(self) -> list[AddedToken]:
        """Tokens of added_tokens.json and of tokenizer_config.json, which wins, by id."""
        found: dict[int, AddedToken] = {}
        special = self.extra_special() | set(self.named().values())
        path = self.folder / "added_tokens.json"
        for content, token in read_json(path).items():
            found[_token_id(token, content, path)] = AddedToken(
                content=_token_text(content, "a token", path), id=token, special=content in special
            )
        entries: Any = self.settings.get("added_tokens_decoder")
        if entries is not None and not is_object(entries):
            raise self.fail("added_tokens_decoder is not an object")
        for key, entry in (entries or {}).items():
            token = _added_token(key, entry, self.settings_path)
            found[token.id] = token
        return [found[token] for token in sorted(found)]

    def config_ids(self, key: str) -> list[int]:
        """Ids in config.json under `key`, which holds a number, a list, or nothing."""
        value = self.config.get(key)
        listed = value if is_list(value) else [value]
        return [token for token in listed if type(token) is int and token >= 0]

    def padded_size(self) -> int:
        value = self.config.get("vocab_size")
        return value if type(value) is int else 0


def _token_text(value: Any, name: str, path: Path) -> str:
    text = value.get("content") if is_object(value) else value
    if not isinstance(text, str) or not text or not is_utf8(text):
        raise TokenizerError(f"{path}: {name} is {value!r}, not a token's text")
    return text


def _token_id(value: Any, name: str, path: Path) -> int:
    if type(value) is not int or not 0 <= value < _MAX_IDS:
        raise TokenizerError(f"{path}: the token {name!r} has {value!r} for an id")
    return value


def _added_token(key: str, entry: Any, path: Path) -> AddedToken:
    if not key.isdecimal() or not is_object(entry):
        raise TokenizerError(f"{path}: added_tokens_decoder holds {key!r}: {entry!r}")
    flags = {name: entry.get(name, False) for name in _FLAGS}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TokenizerError(f"{path}: token {key} has {name} = {flag!r}, not true or false")
    content = _token_text(entry, f"token {key}", path)
    return AddedToken(content=content, id=_token_id(int(key[:20]), key, path), **flags)

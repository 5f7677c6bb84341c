"""Vocabularies that the tokenizers library encodes: tokenizer.json, and GGUF's BPE by rank."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from turbospark.errors import TokenizerError
from turbospark.tokenizer.decoding import Decoding, read_decoding
from turbospark.tokenizer.vocabulary import AddedToken, refuse_respelled

Result = TypeVar("Result")


def guarded(source: str, work: Callable[[], Result]) -> Result:
    """Run a call into the tokenizers library; every failure becomes an error naming `source`.

    The library raises bare Exception, and a panic of its Rust code arrives as `PanicException`,
    which derives from BaseException only.

    Raises:
        TokenizerError: the call failed; quotes the library's reason.
    """
    try:
        return work()
    except (MemoryError, RecursionError, TokenizerError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"{source} is not a usable tokenizer: {' '.join(str(error).split())[:300]}"
        ) from None


class TokenizersVocabulary:
    """A `tokenizers.Tokenizer` behind the questions that turbospark asks."""

    def __init__(
        self,
        tokenizer: Any,
        source: str,
        *,
        spellings: Mapping[int, str] | None = None,
        skipped: Iterable[int] = (),
    ) -> None:
        """Wrap a tokenizer; its truncation and padding are switched off.

        Args:
            tokenizer: a `tokenizers.Tokenizer`, owned from here on.
            source: the file that messages name.
            spellings: id to text where the tokenizer holds a stand-in.
            skipped: further ids that `decode` leaves out.

        Raises:
            TokenizerError: it is empty, or decodes in a way that is not implemented.
        """
        self.source = source
        self._tokenizer = tokenizer
        self._spellings = dict(spellings or {})
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._lock = threading.Lock()  # encode_special_tokens is a switch on the tokenizer
        added = {int(token): value for token, value in tokenizer.get_added_tokens_decoder().items()}
        self._added = {token: str(value.content) for token, value in added.items()}
        special = [token for token, value in added.items() if value.special]
        self.special_ids = frozenset([*skipped, *special])
        self._decoding = self._read_decoding()
        self.leading_spaces = self._decoding.leading_spaces
        self.size = guarded(source, self._count)

    def _read_decoding(self) -> Decoding:
        decoder = self._tokenizer.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        return read_decoding(state, self.source)

    def _count(self) -> int:
        count = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        if not count:
            raise TokenizerError(f"{self.source} has an empty vocabulary")
        if any(self._tokenizer.id_to_token(token) is None for token in range(count)):
            ids: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
            count = max(ids.values()) + 1
        return max(count, *(token + 1 for token in self._spellings), 0)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        def work() -> list[int]:
            with self._lock:
                self._tokenizer.encode_special_tokens = not parse_special
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
            return list(encoding.ids)

        return guarded(self.source, work)

    def token_id(self, text: str) -> int | None:
        found = self._tokenizer.token_to_id(text)
        return None if found is None else int(found)

    def token_text(self, token: int) -> str:
        if token in self._spellings:
            return self._spellings[token]
        if token in self._added:
            return self._added[token]
        found = self._tokenizer.id_to_token(token)
        return "" if found is None else str(found)

    def token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._decoding.added_bytes(self._added[token])
        return self._decoding.token_bytes(self.token_text(token))

    def save(self, folder: Path) -> Mapping[int, AddedToken]:
        """Write tokenizer.json, which holds every added token itself.

        Raises:
            TokenizerError: tokens without a text of their own stand in it.
        """
        refuse_respelled(self.source, self._spellings, "tokenizer.json")
        self._tokenizer.save(str(folder / "tokenizer.json"))
        return {}


def load_tokenizer_json(path: Path) -> Any:
    """Read tokenizer.json into a `tokenizers.Tokenizer`.

    Raises:
        TokenizerError: the file is damaged; names it and quotes the library's reason.
    """
    from tokenizers import Tokenizer as Engine

    def work() -> Any:
        return Engine.from_file(str(path))

    return guarded(str(path), work)


def wrapping_ids(tokenizer: Any, source: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer's post-processor puts before and after a single text.

    Raises:
        TokenizerError: the post-processor is of a kind that is not implemented, or puts ids that
            no token has.
    """
    processor = tokenizer.post_processor
    if processor is None:
        return (), ()
    state = json.loads(processor.__getstate__())
    steps = state["processors"] if state["type"] == "Sequence" else [state]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    for step in steps:
        kind = step["type"]
        if kind == "TemplateProcessing":
            head, tail = _template_ids(step, source)
        elif kind in {"BertProcessing", "RobertaProcessing"}:
            head, tail = (int(step["cls"][1]),), (int(step["sep"][1]),)
        elif kind == "ByteLevel":
            continue
        else:
            raise TokenizerError(f"{source}: the post-processor {kind!r} is not implemented")
        before, after = head + before, after + tail
    for token in before + after:
        if tokenizer.id_to_token(token) is None:
            raise TokenizerError(
                f"{source}: the post-processor puts id {token}, which no token has"
            )
    return before, after


def _template_ids(step: Mapping[str, Any], source: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before: list[int] = []
    after: list[int] = []
    side = before
    for item in step["single"]:
        if "Sequence" in item:
            side = after
            continue
        name = item["SpecialToken"]["id"]
        if name not in step["special_tokens"]:
            raise TokenizerError(f"{source}: the post-processor's token {name!r} has no ids")
        side.extend(int(token) for token in step["special_tokens"][name]["ids"])
    return tuple(before), tuple(after)


def add_tokens(tokenizer: Any, tokens: Iterable[AddedToken], source: str) -> None:
    """Register tokens that a tokenizer must find in a text.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; mutated.
        tokens: their ids are those the tokenizer already gives, or follow its last one.
        source: the file that messages name.

    Raises:
        TokenizerError: a token would get another id than the one stated.
    """
    from tokenizers import AddedToken as EngineToken

    listed = list(tokens)
    for special in (True, False):
        engine_tokens = [
            EngineToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=special,
            )
            for token in listed
            if token.special == special
        ]
        if engine_tokens:
            add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
            guarded(source, lambda add=add, batch=engine_tokens: add(batch))
    for token in listed:
        found = tokenizer.token_to_id(token.content)
        if found != token.id:
            raise TokenizerError(
                f"{source} gives the token {token.content!r} the id {token.id}, but the "
                f"vocabulary gives it {found}"
            )

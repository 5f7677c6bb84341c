"""Vocabularies that the sentencepiece library encodes: its own model files, and GGUF's SPM kind."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turbospark.errors import TokenizerError
from turbospark.tokenizer.added import AddedTokens
from turbospark.tokenizer.sentencepiece_model import Normalizer
from turbospark.tokenizer.vocabulary import (
    NO_STRIP,
    STRIP_ALL,
    STRIP_ONE,
    AddedToken,
    refuse_respelled,
)

SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SentencePieceVocabulary:
    """A sentencepiece model with tokens added on top.

    An added token takes its id over from the model's piece, if there is one. Where the model puts
    a space before every text, each stretch between added tokens gets one, as in llama.cpp and in
    transformers' legacy mode.
    """

    def __init__(
        self,
        processor: Any,
        normalizer: Normalizer,
        source: str,
        *,
        added: Iterable[AddedToken] = (),
        spellings: Mapping[int, str] | None = None,
        skipped: Iterable[int] = (),
        later: Any = None,
    ) -> None:
        """Put added tokens on top of a model.

        Args:
            processor: a loaded SentencePieceProcessor.
            normalizer: what its model says about white space.
            source: the file that messages name.
            added: tokens found in a text before sentencepiece sees it.
            spellings: id to text where the model holds a stand-in.
            skipped: further ids that `decode` leaves out.
            later: encodes the stretches behind the first added token; by default `processor`.
        """
        self.source = source
        self._processor = processor
        self._added = {token.id: token for token in added}
        self._ids = {token.content: token.id for token in self._added.values()}
        self._splitter = AddedTokens(self._added.values())
        self._spellings = dict(spellings or {})
        self._pieces = int(self._processor.GetPieceSize())
        self.size = max(self._pieces, *(token + 1 for token in self._added), 0)
        self.special_ids = frozenset(
            [*skipped, *(token.id for token in self._added.values() if token.special)]
        )
        self.leading_spaces = _leading_spaces(normalizer)
        self._later = later or processor

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        processor = self._processor
        for part in self._splitter.split(text, parse_special=parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(processor.EncodeAsIds(part))
            processor = self._later
        return ids

    def token_id(self, text: str) -> int | None:
        if text in self._ids:
            return self._ids[text]
        found = int(self._processor.PieceToId(text))
        return found if self.token_text(found) == text else None

    def token_text(self, token: int) -> str:
        if token in self._added:
            return self._added[token].content
        if token in self._spellings:
            return self._spellings[token]
        if token >= self._pieces:
            return ""
        return piece_text(self._processor, token, self.source)

    def token_bytes(self, token: int) -> bytes:
        text = self.token_text(token)
        if token in self._added:
            return text.encode()
        if self._processor.IsByte(token) and (byte := _BYTE_PIECE.fullmatch(text)):
            return bytes((int(byte[1], 16),))
        return text.replace(SPACE, " ").encode()

    def save(self, folder: Path) -> Mapping[int, AddedToken]:
        """Write tokenizer.model; return the tokens on top of it.

        Raises:
            TokenizerError: tokens without a text of their own stand in it.
        """
        refuse_respelled(self.source, self._spellings, "tokenizer.model")
        (folder / "tokenizer.model").write_bytes(self._processor.serialized_model_proto())
        return self._added


def load_processor(model: bytes, source: str) -> Any:
    """A sentencepiece processor for a serialised model.

    Raises:
        TokenizerError: the model is damaged; quotes sentencepiece's reason.
    """
    from sentencepiece import SentencePieceProcessor

    processor: Any = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
        if processor.GetPieceSize() > 0:
            return processor
        reason = "it holds no pieces"
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        reason = " ".join(str(error).split())
    raise TokenizerError(f"{source} is not a usable sentencepiece model: {reason}")


def piece_text(processor: Any, token: int, source: str) -> str:
    """A piece as the model spells it.

    Raises:
        TokenizerError: it is not UTF-8; names `source`.
    """
    try:
        return str(processor.IdToPiece(token))
    except UnicodeDecodeError:
        raise TokenizerError(
            f"{source}: token {token} is not UTF-8; download the file again"
        ) from None


def _leading_spaces(normalizer: Normalizer) -> int:
    if normalizer.remove_extra_whitespaces:
        return STRIP_ALL
    return STRIP_ONE if normalizer.add_dummy_prefix else NO_STRIP

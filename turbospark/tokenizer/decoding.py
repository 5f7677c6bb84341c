"""What the decoder of a tokenizer.json does, as bytes a token.

The decoders of language models work token by token: the bytes of a token do not depend on its
neighbours, but for spaces taken off the start of the text. Those are described here; others are
refused by name. Where bytes are not UTF-8, turbospark marks the ill-formed run only, while the
tokenizers library gives up the whole run of byte tokens around it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from turbospark.errors import TokenizerError
from turbospark.tokenizer.vocabulary import NO_STRIP, STRIP_ONE

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens become bytes.

    Attributes:
        byte_level: characters stand for bytes, as in GPT-2.
        byte_fallback: `<0x0A>` is the byte 10.
        replacements: (from, to) in every token, in order.
        separator: put before every token.
        leading_spaces: taken off the start of the text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    separator: str = ""
    leading_spaces: int = NO_STRIP

    def token_bytes(self, text: str) -> bytes:
        """The bytes of a token of the model's own vocabulary."""
        if self.byte_level:
            table = byte_characters()
            if all(character in table for character in text):
                return bytes(table[character] for character in text)
            return text.encode()
        for old, new in self.replacements:
            text = text.replace(old, new)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes((int(byte[1], 16),))
        return (self.separator + text).encode()

    def added_bytes(self, text: str) -> bytes:
        """The bytes of an added token, whose text is no byte-level spelling."""
        return text.encode() if self.byte_level else self.token_bytes(text)


@cache
def byte_characters() -> Mapping[str, int]:
    """The characters that stand for bytes in byte-level vocabularies.

    Printable Latin-1 stands for itself; the other 68 bytes are U+0100 and up, in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in own}
    table |= {chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*own}))}
    return table


def read_decoding(state: Mapping[str, Any] | None, source: str) -> Decoding:
    """Read the `decoder` entry of a tokenizer.json.

    Args:
        state: the entry; None joins tokens with spaces, as the tokenizers library does.
        source: the file that messages name.

    Raises:
        TokenizerError: a step is not implemented; names it.
    """
    if state is None:
        return Decoding(separator=" ", leading_spaces=STRIP_ONE)
    steps = list(_flatten(state))
    kinds = {str(step["type"]) for step in steps}
    if "ByteLevel" in kinds:
        if kinds != {"ByteLevel"}:
            raise _refused(source, f"ByteLevel together with {', '.join(kinds - {'ByteLevel'})}")
        return Decoding(byte_level=True)
    replacements: list[tuple[str, str]] = []
    leading_spaces = NO_STRIP
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            if step["prepend_scheme"] != "never":
                leading_spaces = STRIP_ONE
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            if step["start"] > 1:
                raise _refused(source, f"Strip of {step['start']} spaces")
            leading_spaces = STRIP_ONE if step["start"] else leading_spaces
        elif kind not in {"ByteFallback", "Fuse"}:
            raise _refused(source, str(kind))
    return Decoding(
        byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        leading_spaces=leading_spaces,
    )


def _flatten(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step["decoders"]:
        yield from _flatten(inner)


def _refused(source: str, what: str) -> TokenizerError:
    return TokenizerError(
        f"{source}: the decoder {what} is not implemented; known are ByteLevel, Metaspace, "
        "Replace of a text, ByteFallback, Fuse and Strip of a leading space"
    )

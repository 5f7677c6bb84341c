"""A tokenizer of bytes: every id is known by heart."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from turbospark.errors import TemplateError


class ByteDetokenizer:
    """Bytes in, whole characters out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Take an id; special ones give no text."""
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        """What is left of a character that never became whole."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One id a byte, and three special ones: <bos> 256, <eos> 257, <end> 258.

    Args:
        chat: whether it has a chat template.
    """

    vocab_size = 259
    bos_id: int | None = 256
    eos_ids = frozenset({257, 258})
    special_ids = frozenset({256, 257, 258})
    _special = ("<bos>", "<eos>", "<end>")

    def __init__(self, *, chat: bool = True) -> None:
        self.chat_template: str | None = "built in" if chat else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; the special ones are recognised in it."""
        ids = [256] if add_special_tokens else []
        while text:
            found = min(
                ((at, mark) for mark in self._special if (at := text.find(mark)) >= 0),
                default=(len(text), ""),
            )
            ids.extend(text[: found[0]].encode())
            if found[1]:
                ids.append(256 + self._special.index(found[1]))
            text = text[found[0] + len(found[1]) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        parts = bytearray()
        for token in ids:
            if token < 256:
                parts.append(token)
            elif not skip_special_tokens:
                parts.extend(self._special[token - 256].encode())
        return parts.decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """An id as the vocabulary spells it."""
        return f"<{token:02X}>" if token < 256 else self._special[token - 256]

    def detokenizer(self) -> ByteDetokenizer:
        """A fresh one."""
        return ByteDetokenizer()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **_values: Any,
    ) -> str | list[int]:
        """Every message as `role:content<end>`; ids with `tokenize`, else text."""
        if self.chat_template is None:
            raise TemplateError("this tokenizer has no chat template")
        text = "<bos>" + "".join(f"{m['role']}:{m['content']}<end>\n" for m in messages)
        text += "assistant:" if add_generation_prompt else ""
        return self.encode(text, add_special_tokens=False) if tokenize else text

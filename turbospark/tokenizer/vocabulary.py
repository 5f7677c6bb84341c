"""What every back end of the tokenizer answers, and the values that describe special tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from turbospark.errors import TokenizerError

NO_STRIP = 0
STRIP_ONE = 1
STRIP_ALL = -1


class Vocabulary(Protocol):
    """One vocabulary with its encoder; it knows nothing of templates and of wrapping ids."""

    @property
    def source(self) -> str:
        """The file (or metadata) that messages name."""
        ...

    @property
    def size(self) -> int:
        """The largest id plus one."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        ...

    @property
    def leading_spaces(self) -> int:
        """Spaces that decoding takes off the start: NO_STRIP, STRIP_ONE or STRIP_ALL."""
        ...

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of `text` alone, with no id put before or after."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled `text`."""
        ...

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it; empty for an id that stands for nothing."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a decoded text; whole characters only by their sum."""
        ...

    def save(self, folder: Path) -> "Mapping[int, AddedToken]":
        """Write the vocabulary's own file; return the added tokens that it does not hold."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The part that particular ids play.

    Attributes:
        bos_id: begin of text, or None.
        eos_ids: ids that end a generated text.
        before: ids that `encode` puts before a text.
        after: ids that `encode` puts after a text.
        named: what templates read: `bos_token`, `eos_token` and so on, as text.
    """

    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    named: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that is found in a text before the vocabulary's own encoder runs.

    Attributes:
        content: its text.
        id: its id.
        special: left out by `decode`, and plain text when special tokens are not parsed.
        lstrip: takes the white space before it along.
        rstrip: takes the white space behind it along.
        single_word: found only where no letter, digit or underscore touches it.
        normalized: looked for in the normalised text instead of the text as given.
    """

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def refuse_respelled(source: str, spellings: Mapping[int, str], file: str) -> None:
    """Refuse to save tokens without a text of their own.

    Raises:
        TokenizerError: there are some, and `file` cannot hold them.
    """
    if spellings:
        raise TokenizerError(
            f"{source}: {len(spellings)} tokens have an empty or repeated text, which {file} "
            "cannot hold"
        )

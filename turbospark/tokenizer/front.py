"""The tokenizer that the rest of turbospark and its users see, whatever file it came from."""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turbospark.errors import OptionError, PromptError
from turbospark.tokenizer.chat import ChatTemplates
from turbospark.tokenizer.detokenizer import Detokenizer
from turbospark.tokenizer.vocabulary import SpecialTokens, Vocabulary

_TENSOR_OPTIONS = (
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation",
    "max_length", "tokenizer_kwargs",
)  # fmt: skip


class Tokenizer:
    """Text to ids and back, special tokens and the chat template of one checkpoint.

    `decode(encode(text))` is `text` wherever the vocabulary can spell it. Decoding never tidies
    spaces up, even where tokenizer_config.json asks for `clean_up_tokenization_spaces`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialTokens,
        templates: ChatTemplates,
        padded_size: int = 0,
    ) -> None:
        """Put the parts together.

        Args:
            vocabulary: the back end.
            special: which ids play which part.
            templates: the chat templates, possibly none.
            padded_size: rows of the model's embedding; ids between the vocabulary's size and
                this one decode to nothing.
        """
        self._vocabulary = vocabulary
        self._special = special
        self._templates = templates
        self._padded_size = max(padded_size, vocabulary.size)

    def __len__(self) -> int:
        return self._vocabulary.size

    def __repr__(self) -> str:
        return f"Tokenizer({self._vocabulary.source!r}, vocab_size={len(self)})"

    @property
    def vocab_size(self) -> int:
        """The largest id plus one; the model's embedding may have more rows."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if the vocabulary has one."""
        return self._special.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generated text, as far as the tokenizer's own files say."""
        return self._special.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._vocabulary.special_ids

    @property
    def bos_token(self) -> str | None:
        """The text of the id that begins a text."""
        return self._special.named.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the main id that ends a text."""
        return self._special.named.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """`bos_id` under the name that transformers gives it."""
        return self._special.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`; `eos_ids` holds all of them."""
        return None if self.eos_token is None else self.token_id(self.eos_token)

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source, if the checkpoint has one."""
        return self._templates.default

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled `text`, if there is one."""
        return self._vocabulary.token_id(text)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it, such as `▁the`, `Ġthe` or `<0x0A>`.

        Raises:
            PromptError: the id is outside the vocabulary.
        """
        if not 0 <= token < self._vocabulary.size:
            raise PromptError(f"token id {token} is outside the vocabulary of {len(self)} ids")
        return self._vocabulary.token_text(token)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[int]:
        """Turn text into ids.

        Args:
            text: any text that UTF-8 can write.
            add_special_tokens: put begin (and end) of text around it, as the checkpoint says. A
                text that already spells its begin of text out gets a second one, as in
                transformers.
            parse_special: text that spells a special token, such as `<end_of_turn>`, becomes
                that token; with False it is plain text, which text from outside should be.

        Raises:
            PromptError: `text` is not text, or holds half of a surrogate pair.
        """
        ids = self._vocabulary.encode(_checked_text(text), parse_special=parse_special)
        if not add_special_tokens:
            return ids
        return [*self._special.before, *ids, *self._special.after]

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """Turn ids into text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            PromptError: an id is outside the vocabulary.
        """
        tokens = ids if isinstance(ids, Iterable) else (ids,)
        return self.detokenizer(skip_special_tokens).decode(map(operator.index, tokens))

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental decoder; building one costs nothing to speak of."""
        skipped = self._vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        return Detokenizer(self._vocabulary, skipped, self._padded_size)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        tokenize: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_values: Any,
    ) -> Any:
        """Write a conversation as the model was trained to read it.

        Args:
            messages: mappings with "role" and "content" (text, None, or a list of parts).
            tools: JSON schemas of tools, for templates that read them.
            add_generation_prompt: end with the head of an assistant message. Unlike in
                transformers this is the default, since the text is for generating.
            tokenize: return ids, else the text.
            continue_final_message: leave the last message open, so that the model goes on with it.
            chat_template: the name of one of the checkpoint's templates, or a template's source.
            template_values: variables of the template, such as `enable_thinking`.

        Returns:
            list[int] without further special tokens, or str when `tokenize` is False.

        Raises:
            TemplateError: there is no template, or it refuses the messages.
            OptionError: an option of transformers that has no meaning here is given.
        """
        for name in _TENSOR_OPTIONS:
            if template_values.pop(name, None):
                raise OptionError(
                    f"apply_chat_template does not take {name}: it returns a list of ids, or text "
                    "with tokenize=False"
                )
        if continue_final_message and add_generation_prompt:
            raise OptionError(
                "continue_final_message leaves the last message open, add_generation_prompt "
                "begins a new one; give one of them"
            )
        text = self._templates.render(
            messages,
            tools=tools,
            template=chat_template,
            add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
            continue_final_message=continue_final_message,
            special_tokens=self._special.named,
            values=template_values,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def save(self, folder: Path) -> None:
        """Write the files from which `load_tokenizer` builds the same tokenizer.

        tokenizer_config.json has room for one end of text; further `eos_ids` belong into
        config.json, and ids other than begin and end of text that go around a text into
        tokenizer.json.

        Raises:
            TokenizerError: the vocabulary cannot be written as a file of its kind.
        """
        added = self._vocabulary.save(folder)
        settings: dict[str, Any] = dict(self._special.named)
        if self._special.before in {(), (self.bos_token_id,)}:
            settings["add_bos_token"] = bool(self._special.before)
        if self._special.after in {(), (self.eos_token_id,)}:
            settings["add_eos_token"] = bool(self._special.after)
        if (templates := self._templates.as_setting()) is not None:
            settings["chat_template"] = templates
        if added:
            settings["added_tokens_decoder"] = {
                str(token): {name: value for name, value in asdict(item).items() if name != "id"}
                for token, item in sorted(added.items())
            }
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _checked_text(text: Any) -> str:
    if not isinstance(text, str):
        raise PromptError(f"the tokenizer encodes text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python reads arguments and files so that a byte which is no UTF-8 becomes such a code.
        byte = f"; it may stand for the byte 0x{code - 0xDC00:02X} of input that is no UTF-8"
        raise PromptError(
            f"character {error.start} of the text is half of a surrogate pair (U+{code:04X}), "
            f"which UTF-8 cannot write{byte if 0xDC80 <= code <= 0xDCFF else ''}"
        ) from None
    return text

"""Chat templates: where they come from, which one counts, and what messages they are given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbospark.errors import TemplateError
from turbospark.tokenizer.files import read_json
from turbospark.tokenizer.messages import checked_messages
from turbospark.tokenizer.shapes import is_list, is_object
from turbospark.tokenizer.template import Template

DEFAULT, TOOL_USE = "default", "tool_use"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text and the file that messages name."""

    text: str
    origin: str


class ChatTemplates:
    """The templates of one checkpoint by name, compiled when first used."""

    def __init__(self, sources: Mapping[str, TemplateSource], owner: str) -> None:
        """Keep the templates.

        Args:
            sources: name to template; "default" is used unless tools are given and "tool_use"
                exists.
            owner: the checkpoint that messages name.
        """
        self._sources = dict(sources)
        self._owner = owner
        self._compiled: dict[TemplateSource, Template] = {}

    @property
    def default(self) -> str | None:
        """The source of the template that plain conversations are written with."""
        source = self._sources.get(DEFAULT)
        return None if source is None else source.text

    def as_setting(self) -> str | list[dict[str, str]] | None:
        """The templates as tokenizer_config.json holds them."""
        if not self._sources or self._sources.keys() == {DEFAULT}:
            return self.default
        return [{"name": name, "template": source.text} for name, source in self._sources.items()]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        special_tokens: Mapping[str, str],
        values: Mapping[str, Any],
    ) -> str:
        """Write a conversation; see `Tokenizer.apply_chat_template`.

        Raises:
            TemplateError: no template, or one that refuses or fails; says what to change.
        """
        conversation = checked_messages(messages, tools, continue_final_message)
        compiled = self._compile(self._choose(template, bool(conversation.tools)))
        given = {"add_generation_prompt": add_generation_prompt, **special_tokens, **values}
        return compiled.render(conversation, given, frozenset(values))

    def _choose(self, template: str | None, has_tools: bool) -> TemplateSource:
        if template is not None and template not in self._sources:
            if "{" not in template:
                known = ", ".join(sorted(self._sources)) or "none"
                raise TemplateError(f"{self._owner} has no chat template {template!r}; has {known}")
            return TemplateSource(template, "the chat_template argument")
        if template is None:
            template = TOOL_USE if has_tools and TOOL_USE in self._sources else DEFAULT
        if template in self._sources:
            return self._sources[template]
        if self._sources:
            raise TemplateError(
                f"{self._owner} has no default chat template; name one of "
                f"{', '.join(sorted(self._sources))} with chat_template="
            )
        raise TemplateError(
            f"{self._owner} has no chat template, as base models do; give the prompt as text, or "
            "a template's source with chat_template="
        )

    def _compile(self, source: TemplateSource) -> Template:
        if source not in self._compiled:
            self._compiled[source] = Template(source.text, source.origin)
        return self._compiled[source]


def templates_from_folder(folder: Path, settings: Mapping[str, Any]) -> ChatTemplates:
    """The chat templates of a checkpoint folder.

    For each name the strongest source counts: chat_template.jinja (and
    additional_chat_templates/NAME.jinja), then tokenizer_config.json, then chat_template.json.

    Args:
        folder: the checkpoint.
        settings: its tokenizer_config.json.

    Raises:
        TokenizerError: a file is unreadable, or holds no template where one belongs; names it.
    """
    found: dict[str, TemplateSource] = {}
    path = folder / "chat_template.json"
    found |= _from_json(read_json(path).get("chat_template"), str(path))
    path = folder / "tokenizer_config.json"
    found |= _from_json(settings.get("chat_template"), str(path))
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = _from_file(extra)
    if (folder / "chat_template.jinja").exists():
        found[DEFAULT] = _from_file(folder / "chat_template.jinja")
    return ChatTemplates(found, str(folder))


def templates_from_gguf(metadata: Mapping[str, Any], source: str) -> ChatTemplates:
    """The chat templates in GGUF metadata: the unnamed one and `tokenizer.chat_template.NAME`.

    Raises:
        TemplateError: one is not text; names `source` and the key.
    """
    key = "tokenizer.chat_template"
    found: dict[str, TemplateSource] = {}
    for name, value in metadata.items():
        if name == key or name.startswith(key + "."):
            if not isinstance(value, str):
                raise TemplateError(f"{source}: {name} is {type(value).__name__}, not text")
            found[name.removeprefix(key).lstrip(".") or DEFAULT] = TemplateSource(
                value, f"{source}, {name}"
            )
    return ChatTemplates(found, source)


def _from_json(value: Any, path: str) -> dict[str, TemplateSource]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: TemplateSource(value, path)}
    found: dict[str, TemplateSource] = {}
    for name, text in _named_pairs(value, path):
        if not isinstance(name, str) or not isinstance(text, str):
            raise TemplateError(f"{path}: chat_template holds {name!r}: {text!r}, not two texts")
        found[name] = TemplateSource(text, f"{path}, template {name!r}")
    return found


def _named_pairs(value: Any, path: str) -> list[tuple[Any, Any]]:
    if is_object(value):
        return list(value.items())
    if is_list(value) and all(map(is_object, value)):
        return [(item.get("name"), item.get("template")) for item in value]
    raise TemplateError(f"{path}: chat_template is neither text nor a list of named templates")


def _from_file(path: Path) -> TemplateSource:
    try:
        return TemplateSource(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {error}") from None

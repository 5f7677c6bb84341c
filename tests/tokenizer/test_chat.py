import datetime
import json
import subprocess
import sys

import pytest
from tokenizer.test_load import MODELS
from tokenizer.vocabularies import score_metadata, tokenizer_json, write_folder

from turbospark.errors import OptionError, TemplateError, TokenizerError
from turbospark.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

PLAIN = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
[{{ message.role }}]{{ message['content'] | trim }}
{%- endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""

PARTS_TOO = """{% for message in messages %}[{{ message.role }}]{% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}"""

PARTS_ONLY = """{% for message in messages %}[{{ message.role }}]
{%- for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}
{% endfor %}"""

USER = {"role": "user", "content": "fox"}
REPLY = {"role": "assistant", "content": "dog"}


def tokenizer(template: str | None = PLAIN) -> Tokenizer:
    extra = {} if template is None else {"tokenizer.chat_template": template}
    return tokenizer_from_gguf({**score_metadata(), **extra}, "chat.gguf")


def write(messages, template: str = PLAIN, **options) -> str:
    return tokenizer(template).apply_chat_template(messages, tokenize=False, **options)


def test_conversation_is_written_with_the_head_of_a_reply():
    assert write([USER, REPLY, USER]) == "<s>[user]fox[assistant]dog[user]fox[assistant]"
    assert write([USER], add_generation_prompt=True) == "<s>[user]fox[assistant]"
    assert write([USER], add_generation_prompt=False) == "<s>[user]fox"


def test_ids_are_those_of_the_text_without_further_special_tokens():
    chat = tokenizer()
    text = chat.apply_chat_template([USER], tokenize=False)
    assert chat.apply_chat_template([USER]) == chat.encode(text, add_special_tokens=False)
    assert chat.apply_chat_template([USER]).count(chat.bos_id) == 1


def test_two_user_turns_are_refused_with_the_templates_words_and_advice():
    with pytest.raises(TemplateError, match=r"roles must alternate user/.*; merge messages") as e:
        write([USER, USER])
    assert "chat.gguf" in str(e.value)


def test_no_template_is_an_error_that_says_what_to_do():
    with pytest.raises(TemplateError, match=r"chat.gguf has no chat template.*prompt as text"):
        tokenizer(None).apply_chat_template([USER])
    assert tokenizer(None).chat_template is None
    given = tokenizer(None).apply_chat_template([USER], tokenize=False, chat_template=PLAIN)
    assert given == "<s>[user]fox[assistant]"


@pytest.mark.parametrize("template", [PLAIN, PARTS_TOO, PARTS_ONLY])
def test_text_and_text_parts_come_out_alike(template):
    parts = [{"type": "text", "text": "red "}, {"type": "text", "text": "fox"}]
    expected = write([{"role": "user", "content": "red fox"}], template)
    assert "[user]red fox" in expected
    assert write([{"role": "user", "content": parts}], template) == expected
    assert write([{"role": "user", "content": ("red ", "fox")}], template) == expected


def test_part_that_is_no_text_is_refused_where_the_template_reads_text_only():
    content = [{"type": "image"}, {"type": "text", "text": "fox"}]
    assert write([{"role": "user", "content": content}], PARTS_TOO) == "[user]<image>fox"
    with pytest.raises(TemplateError, match="message 0 holds a part of type 'image'"):
        write([{"role": "user", "content": content}])


def test_content_none_beside_tool_calls_is_written_as_nothing():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    calls = [{"function": {"name": "f"}}]
    for message in (
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
    ):
        assert write([message], template) == f"[assistant]{calls}"
    assert write([{"role": "user", "content": None}]) == "<s>[user][assistant]"
    assert write([{"role": "user", "content": []}]) == "<s>[user][assistant]"


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "empty; give at least one"),
        ("fox", "messages are str"),
        ({"role": "user", "content": "fox"}, "messages are dict"),
        (None, "messages are NoneType"),
        (["fox"], "message 0 is str"),
        ([[USER]], "message 0 is list"),
        ([{"content": "fox"}], "message 0 has the role None"),
        ([{"role": 3, "content": "fox"}], "message 0 has the role 3"),
        ([USER, {"role": "assistant"}], 'message 1 .assistant. has no "content"'),
        ([{"role": "user", "content": 7}], "content of message 0 .user. is int"),
        ([{"role": "user", "content": {"text": "x"}}], "content of message 0 .user. is dict"),
        ([{"role": "user", "content": [7]}], "a part of message 0 is 7"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of message 0"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused(messages, fault):
    with pytest.raises(TemplateError, match=fault):
        write(messages)


def test_messages_are_not_changed():
    message = {"role": "user", "content": [{"type": "text", "text": "fox"}], "x": None}
    kept = json.dumps(message)
    write([message])
    assert json.dumps(message) == kept


TOOLS = [{"type": "function", "function": {"name": "né<w>"}}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"


def test_tools_are_written_as_json_without_escapes():
    expected = '[{"type": "function", "function": {"name": "né<w>"}}]fox'
    assert write([USER], WITH_TOOLS, tools=TOOLS) == expected
    assert write([USER], WITH_TOOLS) == write([USER], WITH_TOOLS, tools=[]) == "fox"
    assert write([USER], "{{ {'b': 1, 'a': 2} | tojson(indent=2) }}") == '{\n  "b": 1,\n  "a": 2\n}'


def test_tools_that_a_template_does_not_read_are_refused():
    with pytest.raises(TemplateError, match=r"does not read tools; leave it out \(it reads .*mess"):
        write([USER], tools=TOOLS)


@pytest.mark.parametrize("tools", ["f", {"a": 1}, [print], 3])
def test_tools_of_the_wrong_shape_are_refused(tools):
    with pytest.raises(TemplateError, match="JSON schema"):
        write([USER], WITH_TOOLS, tools=tools)


def test_values_reach_the_template_and_unread_ones_are_refused():
    template = "{{ messages[0].content }}{{ '!' if enable_thinking else '.' }}"
    assert write([USER], template, enable_thinking=True) == "fox!"
    assert write([USER], template) == "fox."
    with pytest.raises(TemplateError, match="does not read enable_thinkin;"):
        write([USER], template, enable_thinkin=True)


@pytest.mark.parametrize("option", ["return_tensors", "padding", "truncation", "return_dict"])
def test_options_without_a_meaning_here_are_refused(option):
    with pytest.raises(OptionError, match=option):
        write([USER], **{option: True})
    assert write([USER], **{option: False}) == write([USER])


def test_last_message_can_be_left_open():
    open_end = {"role": "assistant", "content": " dog, "}
    assert write([USER, open_end], continue_final_message=True) == "<s>[user]fox[assistant]dog,"
    with pytest.raises(OptionError, match="give one of them"):
        write([USER, REPLY], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TemplateError, match="needs text in the last message"):
        write([USER, {**REPLY, "content": ""}], continue_final_message=True)
    with pytest.raises(TemplateError, match="cannot be continued"):
        write([USER], "{{ messages[0].content | upper }}", continue_final_message=True)


def test_dialect_of_chat_templates_is_understood():
    loop = "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}"
    assert write([USER], loop + "{% break %}{% endif %}{{ i }}{% endfor %}") == "013"
    block = "{% generation %}{{ messages[0].content }}{% endgeneration %}!"
    assert write([USER], block) == "fox!"
    today = datetime.datetime.now().strftime("%Y")
    assert write([USER], "{{ strftime_now('%Y') }}") == today
    assert write([USER], "  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% if %}", "damaged: .*line 1"),
        ("a\n{{ messages", "damaged: .*line 2"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{{ messages | nofilter }}", "No filter named 'nofilter'"),
        ("{{ messages.append(1) }}", "append.*is not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "range"),
        ("{{ 'x' * 100000000 }}", "more than"),
        ("{{ [1] * 100000000 }}", "more than"),
        ("{{ 9 ** 999999999 }}", "more than"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than"),
        ("{% include 'other' %}", "refused the messages"),
    ],
)
def test_template_that_fails_is_reported_and_stopped(template, fault):
    with pytest.raises(TemplateError, match=fault) as caught:
        write([USER], template)
    assert "chat.gguf, tokenizer.chat_template" in str(caught.value)


def folder(tmp_path, **files):
    return load_tokenizer(write_folder(tmp_path, tokenizer__json=tokenizer_json(), **files))


def test_template_of_tokenizer_config_counts_over_the_json_file(tmp_path):
    chat = folder(tmp_path, chat_template__json={"chat_template": "J"})
    assert chat.chat_template == "J"
    chat = folder(tmp_path, tokenizer_config__json={"chat_template": "C"})
    assert chat.chat_template == "C"


@pytest.mark.parametrize("vocabulary", ["tokenizer__json", "tokenizer__model"])
@pytest.mark.parametrize(
    "files",
    [
        {"chat_template__jinja": PLAIN},
        {"tokenizer_config__json": {"chat_template": PLAIN, "tokenizer_class": "HomeMade"}},
        {"chat_template__json": {"chat_template": PLAIN}},
    ],
    ids=lambda files: next(iter(files)),
)
def test_each_form_of_template_serves_each_kind_of_tokenizer(tmp_path, vocabulary, files):
    contents = {"tokenizer__json": tokenizer_json(), "tokenizer__model": MODELS["plain"]}
    named = {"bos_token": "<s>"}
    write_folder(
        tmp_path, **{vocabulary: contents[vocabulary]}, special_tokens_map__json=named, **files
    )
    text = load_tokenizer(tmp_path).apply_chat_template([USER], tokenize=False)
    assert text == "<s>[user]fox[assistant]"


def test_jinja_file_wins_over_both(tmp_path):
    chat = folder(
        tmp_path,
        chat_template__json={"chat_template": "J"},
        tokenizer_config__json={"chat_template": "C"},
        chat_template__jinja="{{ messages[0].content }} ď\n",
    )
    assert chat.apply_chat_template([USER], tokenize=False) == "fox ď"


def test_named_templates_are_chosen_by_tools_or_by_name(tmp_path):
    templates = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | length }}"},
        {"name": "rag", "template": "R"},
    ]
    chat = folder(tmp_path, tokenizer_config__json={"chat_template": templates})
    assert chat.chat_template == "D{{ messages[0].content }}"
    assert chat.apply_chat_template([USER], tokenize=False) == "Dfox"
    assert chat.apply_chat_template([USER], TOOLS, tokenize=False) == "T1"
    assert chat.apply_chat_template([USER], tokenize=False, chat_template="rag") == "R"
    with pytest.raises(TemplateError, match="no chat template 'nope'; has default, rag, tool_use"):
        chat.apply_chat_template([USER], chat_template="nope")


def test_named_templates_without_a_default_must_be_named(tmp_path):
    named = {"rag": "R", "other": "O"}
    chat = folder(tmp_path, tokenizer_config__json={"chat_template": named})
    with pytest.raises(TemplateError, match="no default chat template; name one of other, rag"):
        chat.apply_chat_template([USER])


def test_additional_template_files_are_found_by_name(tmp_path):
    write_folder(tmp_path / "additional_chat_templates", tool_use__jinja="T{{ tools | length }}")
    chat = folder(tmp_path, chat_template__jinja="D")
    assert chat.apply_chat_template([USER], TOOLS, tokenize=False) == "T1"


def test_named_templates_of_a_gguf_file_are_found():
    key = "tokenizer.chat_template"
    metadata = {**score_metadata(), key: "D", f"{key}.tool_use": "T{{ tools | length }}"}
    chat = tokenizer_from_gguf(metadata)
    assert chat.apply_chat_template([USER], tokenize=False) == "D"
    assert chat.apply_chat_template([USER], TOOLS, tokenize=False) == "T1"
    with pytest.raises(TemplateError, match=r"tokenizer\.chat_template is int"):
        tokenizer_from_gguf({**score_metadata(), key: 3}, "x.gguf")


@pytest.mark.parametrize("bad", [3, ["x"], [{"name": "a"}], [{"name": 1, "template": "a"}]])
def test_malformed_template_entry_is_refused_by_file(tmp_path, bad):
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json.*chat_template"):
        folder(tmp_path, tokenizer_config__json={"chat_template": bad})


def test_unreadable_template_file_is_refused_by_name(tmp_path):
    with pytest.raises(TemplateError, match=r"chat_template.jinja cannot be read"):
        folder(tmp_path, chat_template__jinja=b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template.json is not readable JSON"):
        folder(tmp_path, chat_template__jinja="x", chat_template__json="{")


def test_jinja2_and_the_native_libraries_are_imported_when_first_used():
    code = (
        "import sys, turbospark.tokenizer; "
        "print({'jinja2', 'sentencepiece', 'tokenizers', 'transformers', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

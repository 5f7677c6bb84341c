"""The demo model's vocabulary, 262144 tokens of Gemma 3, as its GGUF file carries it."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizer.small_bpe import merge_by_score, split_at
from tokenizer.vocabularies import CONTROL, NORMAL, USER_DEFINED

from turbospark.errors import TemplateError
from turbospark.loading.demo import PACKAGE, demo_file
from turbospark.loading.gguf import GGUFFile
from turbospark.tokenizer import Tokenizer, tokenizer_from_gguf

pytestmark = [
    pytest.mark.checkpoint,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="demo not installed"),
]

KEY = "tokenizer.ggml."
FROZEN = json.loads(Path(__file__).with_name("demo_ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return GGUFFile(demo_file()).metadata


@pytest.fixture(scope="module")
def demo(metadata) -> Tokenizer:
    return tokenizer_from_gguf(metadata, "demo.gguf")


@pytest.fixture(scope="module")
def slow_parts(metadata) -> tuple[dict[str, float], dict[str, int], set[str], set[str]]:
    rows = list(zip(metadata[KEY + "tokens"], metadata[KEY + "token_type"], strict=True))
    scored = zip(rows, metadata[KEY + "scores"], strict=True)
    scores = {token: score for (token, kind), score in scored if kind == NORMAL}
    ids = {token: index for index, (token, _) in enumerate(rows)}
    control = {token for token, kind in rows if kind == CONTROL}
    return scores, ids, control, {token for token, kind in rows if kind == USER_DEFINED}


@pytest.mark.parametrize("name", FROZEN)
def test_ids_are_those_frozen_and_those_of_a_slow_encoder(demo, slow_parts, name):
    scores, ids, control, user = slow_parts
    escaped = {token.replace(" ", "▁"): ids[token] for token in user}
    text, found = FROZEN[name]["text"], [2]
    for part, is_control in split_at(text, control):
        if is_control:
            found.append(ids[part])
            continue
        for stretch, is_user in split_at(part.replace(" ", "▁"), escaped):
            if is_user:
                found.append(escaped[stretch])
                continue
            for symbol in merge_by_score(stretch, scores):
                spelled = [f"<0x{byte:02X}>" for byte in symbol.encode()]
                found += [ids[s] for s in ([symbol] if symbol in scores else spelled)]
    assert demo.encode(text) == found
    assert found == FROZEN[name]["ids"]


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_ids_stream_back_to_their_text(demo, name):
    text, ids = FROZEN[name]["text"], FROZEN[name]["ids"]
    detokenizer = demo.detokenizer(skip_special_tokens=False)
    streamed = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert streamed == demo.decode(ids, skip_special_tokens=False)
    assert streamed.removeprefix("<bos>") == text.replace("▁", " ")


def test_every_token_streams_as_it_decodes(demo):
    detokenizer = demo.detokenizer()
    step = 97  # coprime to the runs of byte tokens, line breaks and spaces
    ids = list(range(0, len(demo), step)) + list(range(512))
    parts = [detokenizer.add(token) for token in ids]
    assert "".join(parts) + detokenizer.finish() == demo.decode(ids)


def test_special_ids_are_as_the_model_was_trained(demo):
    assert (demo.bos_id, demo.bos_token, demo.eos_token) == (2, "<bos>", "<eos>")
    assert demo.eos_ids == {1, 106}
    assert demo.token_text(106) == "<end_of_turn>"
    assert len(demo) == 262144
    assert {0, 1, 2, 3, 105, 106} <= demo.special_ids
    assert not {107, 138, 5} & demo.special_ids


def test_base_model_has_no_chat_template(demo):
    with pytest.raises(TemplateError, match="has no chat template, as base models do"):
        demo.apply_chat_template([{"role": "user", "content": "Hello"}])


def test_vocabulary_is_built_in_a_moment_and_in_little_memory(metadata):
    begin = time.process_time()
    tokenizer_from_gguf(metadata)
    assert time.process_time() - begin < 1.0
    code = (
        "import resource, sys\n"
        "from turbospark.loading.gguf import GGUFFile\n"
        "from turbospark.tokenizer import tokenizer_from_gguf\n"
        "metadata = GGUFFile(sys.argv[1]).metadata\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "tokenizer_from_gguf(metadata)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", code, str(demo_file())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    assert int(done.stdout) * unit < 120e6

"""The installed package, from files on disk to text; runs against a wheel too."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import turbospark as ts
from turbospark.testing import write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny: Path) -> ts.Engine:
    return ts.load(tiny)


def test_a_folder_becomes_text(engine: ts.Engine) -> None:
    out = engine.generate("hello there", max_tokens=12)
    assert len(out.token_ids) == 12
    assert out == engine.tokenizer.decode(out.token_ids)
    assert engine.generate("hello there", max_tokens=12).token_ids == out.token_ids


def test_chunks_and_reuse_do_not_change_the_text(engine: ts.Engine) -> None:
    model, tokenizer = engine
    prompt = "a prompt of some forty bytes or even more"
    cold = ts.generate(model, tokenizer, prompt, max_tokens=12)
    for chunk in (1, 3, 7):
        out = ts.generate(model, tokenizer, prompt, max_tokens=12, prefill_step_size=chunk)
        assert out.token_ids == cold.token_ids
    engine.generate(prompt[:20] + "something else", max_tokens=5)
    warm = engine.generate(prompt, max_tokens=12)
    assert warm.reused_tokens >= 20
    assert warm.token_ids == cold.token_ids


def test_a_text_does_not_depend_on_what_was_asked_before(tiny: Path) -> None:
    prompts = ["hello there", "hello you", "something else", "hello there and more"]
    cold = [ts.load(tiny).generate(prompt, max_tokens=9).token_ids for prompt in prompts]
    for slots in (1, 2, 3):
        engine = ts.load(tiny, session_slots=slots)
        for _ in range(2):
            found = [engine.generate(prompt, max_tokens=9).token_ids for prompt in prompts]
            assert found == cold


def test_a_sampled_text_repeats_with_its_seed(engine: ts.Engine) -> None:
    options = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.95, "seed": 7}
    assert engine.generate("hi", **options).token_ids == engine.generate("hi", **options).token_ids


def test_a_prompt_of_every_byte_streams_as_it_decodes(engine: ts.Engine) -> None:
    parts = list(engine.stream("日本語 👩‍👩‍👧 ď ", max_tokens=40, temperature=1.5, seed=1))
    assert "".join(part.text for part in parts) == engine.tokenizer.decode(parts[-1].token_ids)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_threads_may_take_turns_from_loading_on(tiny: Path, kernels: str) -> None:
    def in_thread(work: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:  # a new thread each time
            return pool.submit(work).result()

    engine = in_thread(lambda: ts.load(tiny, kernels=kernels))
    here = engine.generate("hello", max_tokens=5)
    there = in_thread(lambda: engine.generate("hello", max_tokens=5))
    assert there.token_ids == here.token_ids
    assert there.reused_tokens == 4
    stream = engine.stream("hello you", max_tokens=6)
    parts = [next(stream), in_thread(lambda: next(stream)), next(stream)]
    alone = ts.generate(*engine, "hello you", max_tokens=3)
    assert [part.token for part in parts] == alone.token_ids
    assert in_thread(lambda: float(parts[0].logprobs.max().item())) <= 0.0


def test_two_threads_talk_at_once(engine: ts.Engine) -> None:
    said = ["hello there", " and you", " or not", " at all"]

    def talk(name: str) -> list[list[int]]:
        with engine.session(name) as chat:
            return [chat.send(text, max_tokens=9).token_ids for text in said]

    alone = talk("alone")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, ["one", "two"])) == [alone, alone]


@pytest.mark.parametrize("long", ["session", "generate"])
def test_a_short_reply_does_not_wait_for_a_long_text_to_end(engine: ts.Engine, long: str) -> None:
    begun, ended = threading.Event(), threading.Event()

    def went_on(_done: int, _total: int) -> None:
        begun.set()

    def talk() -> None:
        options = {"max_tokens": 400, "prompt_progress_callback": went_on}
        say = engine.generate if long == "generate" else engine.session().send
        say("a long story", **options)
        ended.set()

    thread = threading.Thread(target=talk)
    thread.start()
    assert begun.wait(30)
    with engine.session() as chat:
        assert len(chat.send("hello", max_tokens=3).token_ids) == 3
    assert not ended.is_set()
    thread.join()


def test_quantized_on_loading_it_still_talks(tiny: Path) -> None:
    small = ts.load(tiny, quantize="int8-g32", max_context=64)
    assert small.max_context == 64
    assert len(small.generate("hello", max_tokens=5).token_ids) == 5


def test_a_folder_cut_short_is_an_error_that_names_it(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ts.CheckpointError, match=r"model\.safetensors"):
        ts.load(broken)


def test_the_command_runs_from_another_folder(tiny: Path, tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "turbospark.cli", "generate", "hello", "--model", str(tiny),
         "--max-tokens", "5", "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(json.loads(shown.stdout)["token_ids"]) == 5

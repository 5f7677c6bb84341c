"""What users call, over a scripted model."""

import copy
import gc
import inspect
import itertools
import pickle
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import turbospark as ts
from turbospark.errors import (
    ContextLengthError,
    NonFiniteError,
    OptionError,
    ProducerError,
    PromptError,
    SourceError,
    UnsupportedError,
)
from turbospark.runner.results import GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.settings import UNBUILT
from turbospark.testing import (
    ByteTokenizer,
    ScriptedDrafter,
    ScriptedModel,
    hashed_logits,
    scripted_engine,
    scripted_logits,
)

MLX_LM_FIELDS = (
    "text", "token", "logprobs", "from_draft", "prompt_tokens", "prompt_tps", "generation_tokens",
    "generation_tps", "peak_memory", "finish_reason",
)  # fmt: skip
OWN_FIELDS = (
    "token_ids", "stop_reason", "reused_tokens", "reuse_reason", "evicted", "ttft", "drafted",
    "accepted", "accepted_per_position", "draft_off_reason",
)  # fmt: skip


def speaking(text: str, prompt_tokens: int = 3, **options: Any) -> ts.Engine:
    """An engine that answers a prompt of so many tokens with a text and <eos>."""
    script = [*text.encode(), 257]
    return scripted_engine(ScriptedModel(scripted_logits(259, script, prompt_tokens)), **options)


def test_generate_is_a_str_that_carries_its_result() -> None:
    out = speaking("hello").generate("hi")
    assert out == "hello"
    assert isinstance(out, str)
    assert out + "!" == "hello!"
    for name in (*MLX_LM_FIELDS, *OWN_FIELDS):
        assert hasattr(out, name), name
    assert out.text == "hello"
    assert out.finish_reason == "stop"
    assert out.stop_reason == 257
    assert out.token_ids == [*b"hello", 257]
    assert out.generation_tokens == 6
    assert out.prompt_tokens == 3
    assert "GeneratedText('hello'" in repr(out)
    assert "tok/s" in repr(out)
    assert pickle.loads(pickle.dumps(out)) == "hello"
    with pytest.raises(AttributeError):
        _ = out.nonsense


def test_html_of_a_result_is_escaped() -> None:
    out = speaking("<b>&").generate("hi")
    assert "&lt;b&gt;&amp;" in out._repr_html_()
    assert "<b>" not in out._repr_html_()
    assert "&lt;" in next(iter(speaking("<").stream("hi")))._repr_html_()


def test_stream_gives_one_response_a_token_and_the_last_has_a_reason() -> None:
    parts = list(speaking("héllo").stream("hi"))
    assert "".join(part.text for part in parts) == "héllo"
    assert [part.generation_tokens for part in parts] == list(range(1, 8))
    assert [part.finish_reason for part in parts] == [None] * 6 + ["stop"]
    assert parts[2].token_ids == list("hé".encode())
    assert all(part.from_draft is False for part in parts)
    assert parts[-1].peak_memory == mx.get_peak_memory() / 1e9
    assert parts[0].ttft == parts[-1].ttft > 0


def test_logprobs_are_a_distribution_over_the_vocabulary() -> None:
    part = next(speaking("x").stream("hi", logprobs=2))
    assert part.logprobs.shape == (259,)
    assert mx.exp(part.logprobs).sum().item() == pytest.approx(1.0, abs=1e-4)
    assert part.top_logprobs[0][0] == part.token == ord("x")
    assert part.logprob == pytest.approx(part.logprobs[ord("x")].item(), abs=1e-5)


def test_the_budget_ends_by_length() -> None:
    out = speaking("hello").generate("hi", max_tokens=2)
    assert (out, out.finish_reason, out.stop_reason) == ("he", "length", None)


def test_no_limit_fills_the_context() -> None:
    engine = scripted_engine(tokenizer=_never_ending(), max_context=20)
    assert engine.generate("hi", max_tokens=-1).generation_tokens == 17


def test_a_stop_string_names_itself() -> None:
    out = speaking("hello").generate("hi", stop="ll")
    assert (out, out.finish_reason, out.stop_reason) == ("he", "stop", "ll")
    assert speaking("hello").generate("hi", stop=["zz", "lo"]) == "hel"


def test_extra_stop_ids_end_a_text_too() -> None:
    out = speaking("hello").generate("hi", stop_token_ids=[ord("o")])
    assert (out, out.stop_reason) == ("hell", ord("o"))
    assert speaking("hello").generate("hi", stop_token_ids=np.array([3, ord("l")])) == "he"
    assert speaking("hello").generate("hi", stop_token_ids=[]) == "hello"


def test_text_ids_arrays_and_messages_are_prompts() -> None:
    engine = scripted_engine()
    ids = engine.tokenizer.encode("hi")
    expected = engine.generate("hi", max_tokens=4).token_ids
    for prompt in (ids, tuple(ids), np.array(ids), mx.array(ids), "<bos>hi"):
        assert engine.generate(prompt, max_tokens=4).token_ids == expected
    message = {"role": "user", "content": "hi"}
    templated = engine.generate([message], max_tokens=4)
    rendered = engine.tokenizer.apply_chat_template([message])
    assert templated.prompt_tokens == len(rendered)
    assert templated.token_ids == engine.generate(rendered, max_tokens=4).token_ids


@pytest.mark.parametrize("prompt", ["", [], (), mx.zeros((0,), mx.int32)])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(PromptError, match="empty"):
        scripted_engine().generate(prompt)


@pytest.mark.parametrize(
    "prompt", [None, 3, b"hi", {"role": "user"}, mx.zeros((1, 2)), ["hi"], [1.5]]
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(PromptError):
        scripted_engine().generate(prompt)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(PromptError, match="token 1 is 259"):
        scripted_engine().generate([1, 259])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("stops", "stop"),
     ("topp", "top_p"), ("promt_cache", "prompt_cache")],
)  # fmt: skip
def test_an_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    engine = scripted_engine()
    model, tokenizer = engine
    for call in (
        lambda: engine.generate("hi", **{name: 1}),
        lambda: engine.stream("hi", **{name: 1}),
        lambda: engine.session().send("hi", **{name: 1}),
        lambda: ts.generate(model, tokenizer, "hi", **{name: 1}),
        lambda: ts.stream_generate(model, tokenizer, "hi", **{name: 1}),
    ):
        with pytest.raises(OptionError, match=rf"'{name}'; did you mean '{nearest}'"):
            call()


def test_options_of_the_chat_apis_that_do_not_exist_are_refused() -> None:
    with pytest.raises(OptionError, match="response_format"):
        scripted_engine().generate("hi", response_format={"type": "json_object"})


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_an_option_of_a_feature_not_built_yet_is_refused_by_name(name: str) -> None:
    model, tokenizer = scripted_engine()
    with pytest.raises(OptionError, match=rf"{name}=4: .* is not built yet"):
        ts.generate(model, tokenizer, "hi", **{name: 4})
    assert ts.generate(model, tokenizer, "hi", max_tokens=1, **{name: None}).generation_tokens == 1


def test_the_defaults_of_mlx_lm_may_be_written_out() -> None:
    model, tokenizer = scripted_engine()
    step = pytest.importorskip("mlx_lm.generate").generate_step
    parameters = inspect.signature(step).parameters.values()
    defaults = {item.name: item.default for item in parameters if item.default is not item.empty}
    defaults |= {"max_tokens": 2, "num_draft_tokens": 2}
    defaults.pop("stream", None)  # where MLX computes, not how
    assert ts.generate(model, tokenizer, "hi", **defaults).generation_tokens == 2


@pytest.mark.parametrize("call", [ts.generate, ts.stream_generate])
def test_a_foreign_model_or_tokenizer_is_refused_by_type(call: Any) -> None:
    model, tokenizer = scripted_engine()
    with pytest.raises(OptionError, match="a model of type ByteTokenizer"):
        call(tokenizer, model, "hi")
    for foreign in (None, "tokenizer", model):
        with pytest.raises(OptionError, match=f"a tokenizer of type {type(foreign).__name__}"):
            call(model, foreign, "hi")
    with pytest.raises(OptionError, match="a model of type NoneType"):
        ts.make_prompt_cache(None)


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", -1), ("top_k", 300), ("max_tokens", 0), ("stop", ""), ("stop", [3]),
     ("seed", -1), ("max_tokens", 1.5), ("temperature", "hot"), ("prefill_chunk", 0),
     ("logit_bias", {259: 1.0}), ("logit_bias", [1.0]), ("logits_processors", "penalty"),
     ("logits_processors", lambda _, logits: logits), ("sampler", "greedy"),
     ("prompt_progress_callback", 5), ("stop_token_ids", 5), ("stop_token_ids", "ab"),
     ("stop_token_ids", [259]), ("stop_token_ids", [-1]), ("stop_token_ids", [1.0]),
     ("stop_token_ids", [True])],
)  # fmt: skip
def test_a_bad_value_is_refused_before_any_state_moves(option: str, value: Any) -> None:
    engine = scripted_engine()
    engine.generate("hi", max_tokens=3)
    fed = engine.runner.session.fed_ids.ids
    with pytest.raises(OptionError, match=option):
        engine.stream("other", **{option: value})
    assert engine.runner.session.fed_ids.ids == fed


def test_too_long_a_prompt_is_refused_before_any_state_moves() -> None:
    engine = scripted_engine(max_context=10)
    engine.generate("hi", max_tokens=3)
    fed = engine.runner.session.fed_ids.ids
    with pytest.raises(ContextLengthError, match="max_context=10"):
        engine.stream("hello", max_tokens=5)
    assert engine.runner.session.fed_ids.ids == fed


def test_temp_is_temperature_and_giving_both_is_refused() -> None:
    engine = scripted_engine()
    both = [
        engine.generate("hi", max_tokens=9, seed=5, **{k: 1.5}) for k in ("temp", "temperature")
    ]
    assert both[0].token_ids == both[1].token_ids
    with pytest.raises(OptionError, match="given twice"):
        engine.generate("hi", temp=1.0, temperature=1.0)


def test_a_seed_repeats_a_text_whatever_ran_before_and_however_it_was_chunked() -> None:
    engine = scripted_engine()
    options = {"max_tokens": 20, "temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1}
    first = engine.generate("hello", seed=3, **options).token_ids
    engine.generate("help", max_tokens=5)
    assert engine.generate("hello", seed=3, **options).token_ids == first
    assert engine.generate("hello", seed=3, prefill_step_size=2, **options).token_ids == first
    assert (
        scripted_engine(prefix_reuse=False).generate("hello", seed=3, **options).token_ids == first
    )
    assert engine.generate("hello", seed=4, **options).token_ids != first


def test_unseeded_texts_differ() -> None:
    engine = scripted_engine(tokenizer=_never_ending())
    texts = {
        tuple(engine.generate("hi", max_tokens=20, temperature=1.0).token_ids) for _ in range(4)
    }
    assert len(texts) == 4


def test_a_later_prompt_reuses_and_says_so() -> None:
    engine = scripted_engine()
    assert engine.generate("hello", max_tokens=3).reused_tokens == 0
    out = engine.generate("hello you", max_tokens=3)
    assert out.reused_tokens == 6
    assert "parts" in out.reuse_reason or "continues" in out.reuse_reason
    off = scripted_engine(prefix_reuse=False)
    off.generate("hello", max_tokens=3)
    again = off.generate("hello you", max_tokens=3)
    assert (again.reused_tokens, again.reuse_reason) == (0, "prefix reuse is off")
    assert again.token_ids == out.token_ids


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_closed_stream_leaves_a_session_that_answers_as_if_cold(after: int) -> None:
    engine = scripted_engine(tokenizer=_never_ending())
    stream = engine.stream("hello", max_tokens=20)
    for _ in range(after):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    expected = scripted_engine(tokenizer=_never_ending()).generate("hello you", max_tokens=6)
    assert engine.generate("hello you", max_tokens=6).token_ids == expected.token_ids


def test_a_later_call_ends_an_earlier_stream_by_name() -> None:
    engine = scripted_engine(tokenizer=_never_ending())
    stream = engine.stream("hello", max_tokens=20)
    next(stream)
    assert engine.generate("other", max_tokens=3).generation_tokens == 3
    with pytest.raises(ProducerError, match="ended by a later use"):
        next(stream)


def test_progress_ends_at_the_total_and_may_cancel() -> None:
    engine = scripted_engine()
    seen: list[tuple[int, int]] = []
    engine.generate(
        "hello", max_tokens=1, prefill_chunk=4, prompt_progress_callback=lambda *a: seen.append(a)
    )
    assert seen == [(0, 6), (4, 6), (6, 6)]
    out = engine.generate("cancel me", prompt_progress_callback=lambda *_: False)
    assert (out, out.finish_reason, out.token, out.token_ids) == ("", "cancelled", None, [])
    with pytest.raises(AttributeError, match="no token"):
        _ = out.logprobs


def test_non_finite_logits_name_the_layer_and_the_next_call_works() -> None:
    engine = scripted_engine(ScriptedModel(poison=ord("!")))
    for temperature in (0.0, 0.8):
        with pytest.raises(NonFiniteError, match="layer 3"):
            engine.generate("oh!", temperature=temperature)
    expected = scripted_engine().generate("oh", max_tokens=4).token_ids
    assert engine.generate("oh", max_tokens=4).token_ids == expected


def test_an_engine_unpacks_and_the_module_functions_know_its_stop_ids() -> None:
    engine = speaking("hello")
    model, tokenizer = engine
    assert model is engine.model
    assert tokenizer is engine.tokenizer
    tokenizer.eos_ids = frozenset()  # what `load` found out does not hang on the tokenizer
    for first in (model, engine):
        assert ts.generate(first, tokenizer, "hi") == "hello"
        parts = list(ts.stream_generate(first, tokenizer, "hi", 2))
        assert [part.text for part in parts] == ["h", "e"]
        assert parts[0].reused_tokens == 0


def test_the_module_functions_serve_a_model_that_was_not_loaded() -> None:
    model = ScriptedModel(scripted_logits(259, [*b"yes", 257], 3))
    assert ts.generate(model, ByteTokenizer(), "hi") == "yes"


def test_verbose_prints_the_text_and_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = speaking("hello")
    ts.generate(model, tokenizer, "hi", verbose=True)
    shown = capsys.readouterr().out
    assert shown.startswith("hello\n")
    assert "tok/s" in shown


def test_a_prompt_cache_continues_with_every_token_of_the_text() -> None:
    model, tokenizer = scripted_engine(tokenizer=_never_ending())
    cache = ts.make_prompt_cache(model)
    first = ts.generate(model, tokenizer, [1, 2, 3], max_tokens=4, prompt_cache=cache)
    assert cache.text_ids == [1, 2, 3, *first.token_ids]
    second = ts.generate(model, tokenizer, [7, 8], max_tokens=4, prompt_cache=cache)
    assert second.reused_tokens == 6
    whole = ts.generate(model, tokenizer, [1, 2, 3, *first.token_ids, 7, 8], max_tokens=4)
    assert second.token_ids == whole.token_ids


def test_a_prompt_that_says_a_prompt_cache_again_is_refused_and_nothing_moves() -> None:
    model, tokenizer = scripted_engine(tokenizer=_never_ending())
    cache = ts.make_prompt_cache(model)
    first = ts.generate(model, tokenizer, [1, 2, 3], max_tokens=4, prompt_cache=cache)
    said = [1, 2, 3, *first.token_ids]
    for again in (said, [*said, 9]):
        with pytest.raises(PromptError, match="begins with all 7 tokens that prompt_cache holds"):
            ts.generate(model, tokenizer, again, prompt_cache=cache)
    out = ts.generate(model, tokenizer, [9], max_tokens=4, prompt_cache=cache)
    cold = ts.generate(model, tokenizer, [*said, 9], max_tokens=4)
    assert (out.token_ids, out.reused_tokens) == (cold.token_ids, 6)


@pytest.mark.parametrize("prompt", [[7], [7, 8, 9]])
def test_the_same_prompt_twice_says_the_same(prompt: list[int]) -> None:
    engine = scripted_engine(tokenizer=_never_ending())
    texts = [engine.generate(prompt, max_tokens=5) for _ in range(3)]
    assert texts[0].token_ids == texts[1].token_ids == texts[2].token_ids
    assert [text.reused_tokens for text in texts] == [0, len(prompt) - 1, len(prompt) - 1]


@pytest.mark.parametrize("cache", [[], "x", {}])
def test_a_foreign_prompt_cache_is_refused(cache: Any) -> None:
    model, tokenizer = scripted_engine()
    with pytest.raises(OptionError, match="make_prompt_cache"):
        ts.generate(model, tokenizer, "hi", prompt_cache=cache)
    with pytest.raises(OptionError, match=r"engine\.session"):
        scripted_engine().generate("hi", prompt_cache=cache)


def growing(engine: ts.Engine, kind: str, turns: int = 4) -> list[list[ts.GeneratedText]]:
    """Three conversations in turn, each prompt the whole of one so far: ids, or messages."""
    texts: list[list[Any]] = [[], [], []]
    found: list[list[ts.GeneratedText]] = [[], [], []]
    for turn in range(turns):
        for who, text in enumerate(texts):
            piece = f"{who} asks {turn * 7} things"
            if kind == "ids":
                text.extend(engine.tokenizer.encode(piece, add_special_tokens=not text))
            else:
                text.append({"role": "user", "content": piece})
            out = engine.generate(text, max_tokens=5)
            found[who].append(out)
            if kind == "ids":
                text.extend(out.token_ids)
            else:
                text.append({"role": "assistant", "content": out.text})
    return found


@pytest.mark.parametrize("kind", ["ids", "messages"])
@pytest.mark.parametrize("recurrent", [0, 1])
def test_three_conversations_with_three_slots_feed_nothing_twice(kind: str, recurrent: int) -> None:
    def letters(ids: Sequence[int]) -> Any:  # a text that is tokenized again as it was generated
        row = hashed_logits(259)(ids)
        row[:97], row[123:] = -99.0, -99.0
        return row

    model = ScriptedModel(letters, recurrent=recurrent)
    engine = scripted_engine(model, tokenizer=_never_ending(), session_slots=3)
    for who, turns in enumerate(growing(engine, kind)):
        alone = scripted_engine(
            ScriptedModel(letters), tokenizer=_never_ending(), prefix_reuse=False
        )
        expected = growing(alone, kind)[who]
        assert [out.token_ids for out in turns] == [out.token_ids for out in expected]
        assert not any(out.evicted for out in turns)
        for before, out in itertools.pairwise(turns):
            assert out.reused_tokens == before.prompt_tokens + 4, out.reuse_reason


def test_with_two_slots_the_least_recently_used_gives_way_and_it_is_said() -> None:
    engine = scripted_engine(tokenizer=_never_ending(), session_slots=2)
    a, b, c = ([start, *range(20)] for start in (100, 101, 102))
    for text in (a, b):
        assert not engine.generate(text, max_tokens=2).evicted
    assert engine.generate([*a, 7], max_tokens=2).reused_tokens == 21
    out = engine.generate(c, max_tokens=2)
    assert (out.evicted, out.reused_tokens) == (True, 0)
    assert engine.generate([*a, 7, 8], max_tokens=2).reused_tokens == 22
    assert engine.generate([*b, 7], max_tokens=2).reused_tokens == 0


def test_the_same_prompt_again_takes_no_new_slot() -> None:
    engine = scripted_engine(tokenizer=_never_ending(), session_slots=3)
    other = engine.generate([100, 101, 102], max_tokens=20)
    first = engine.generate([1, 2, 3, 4], max_tokens=20)
    again = engine.generate([1, 2, 3, 4], max_tokens=20)
    assert again.reused_tokens == 3
    assert again.token_ids == first.token_ids
    assert len(engine.runner.pool.parked) == 1
    # A text that was gone on with since is kept: this is another one that begins alike.
    longer = [100, 101, 102, *other.token_ids, 7]
    assert engine.generate(longer, max_tokens=20).reused_tokens == 22
    assert engine.generate([100, 101, 102], max_tokens=2).reused_tokens == 0
    assert engine.generate([*longer, 8], max_tokens=2).reused_tokens > 20


def test_a_list_that_changes_afterwards_changes_nothing() -> None:
    engine = scripted_engine(tokenizer=_never_ending(), session_slots=2)
    prompt = [100, *range(20)]
    stream = engine.stream(prompt, max_tokens=6)
    next(stream)
    prompt[5] = 77
    list(stream)
    assert engine.generate([100, *range(20), 9], max_tokens=2).reused_tokens == 21
    assert engine.generate([*prompt, 9], max_tokens=2).reused_tokens in {0, 6}


def test_the_idle_budget_is_announced_as_soon_as_there_can_be_idle_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="turbospark")
    engine = scripted_engine(session_bytes=12_300_000)
    assert engine.session_bytes == 12_300_000
    assert caplog.messages == []
    engine.session()
    engine.session("alice")
    assert caplog.messages == ["idle conversations may keep 12.3 MB"]
    scripted_engine(session_slots=2)
    assert len(caplog.messages) == 2


def drafting_engine(quality: Any = "perfect", **options: Any) -> ts.Engine:
    model = ScriptedModel()
    drafter = ScriptedDrafter(model.logits_of, quality)
    return scripted_engine(model, _never_ending(), drafter=drafter, **options)


def test_a_call_may_leave_drafting_out_or_fix_the_block() -> None:
    expected = scripted_engine(tokenizer=_never_ending()).generate("hi", max_tokens=13)
    assert expected.draft_off_reason == "drafting is off"
    assert (expected.drafted, expected.rounds) == (0, 0)
    engine = drafting_engine(draft_block=2)
    fixed = engine.generate("hi", max_tokens=13)
    assert fixed.accepted_per_position == (4, 4)
    wide = engine.generate("hi", max_tokens=13, draft_block=5)
    assert wide.accepted_per_position == (2, 2, 2, 2, 2)
    assert wide.draft_off_reason is None
    off = engine.generate("hi", max_tokens=13, draft="off")
    assert (off.rounds, off.draft_off_reason) == (0, "drafting was left out of this call")
    for out in (fixed, wide, off):
        assert out.token_ids == expected.token_ids
    assert engine.session().send("hi", max_tokens=3, num_draft_tokens=1).rounds > 0


def test_drafting_that_cannot_be_had_is_refused_by_name() -> None:
    engine = scripted_engine()
    with pytest.raises(OptionError, match="draft_block=3: drafting is off; load with a drafter"):
        engine.generate("hi", draft_block=3)
    with pytest.raises(OptionError, match=r"draft='mtp': what drafts is chosen by load"):
        engine.generate("hi", draft="mtp")
    with pytest.raises(OptionError, match="draft_block=9: a round of the scripted drafter takes"):
        drafting_engine(draft_block=9)
    with pytest.raises(OptionError, match="draft_block=3: drafting is off; load with a drafter"):
        scripted_engine(draft_block=3)
    with pytest.raises(OptionError, match=r"draft_model: what drafts is chosen by load"):
        engine.generate("hi", draft_model=engine.model)


def test_a_prompt_cache_of_another_model_is_refused_and_nothing_moves() -> None:
    model, tokenizer = scripted_engine(tokenizer=_never_ending())
    cache = ts.make_prompt_cache(model)
    ts.generate(model, tokenizer, "hi", max_tokens=4, prompt_cache=cache)
    text = list(cache.text_ids)
    for other in (scripted_engine(), scripted_engine(ScriptedModel(recurrent=1))):
        for taken in (cache, cache.fork()):
            with pytest.raises(OptionError, match="opened for another model than this Scripted"):
                ts.generate(*other, "x", max_tokens=3, prompt_cache=taken)
            with pytest.raises(OptionError, match="opened for another model"):
                Runner(other.model, taken)
    assert cache.text_ids == text
    out = ts.generate(model, tokenizer, "x", max_tokens=3, prompt_cache=cache)
    assert out.reused_tokens == len(text) - 1


def test_a_draft_model_serves_the_module_functions() -> None:
    model, tokenizer = scripted_engine(tokenizer=_never_ending())
    expected = ts.generate(model, tokenizer, "hi", max_tokens=13)
    assert expected.draft_off_reason == "no draft_model was given"
    twin = scripted_engine(tokenizer=_never_ending())
    for draft in (twin, twin.model):
        out = ts.generate(
            model, tokenizer, "hi", max_tokens=13, draft_model=draft, num_draft_tokens=3
        )
        assert out.token_ids == expected.token_ids
        assert out.accepted_per_position == (3, 3, 3)
    other = scripted_engine(ScriptedModel(vocab_size=260), ByteTokenizer(chat=False))
    other.tokenizer.eos_ids = frozenset({3})
    with pytest.raises(OptionError, match="its eos_ids is"):
        ts.generate(model, tokenizer, "hi", draft_model=other)
    with pytest.raises(OptionError, match="a model of type str"):
        ts.generate(model, tokenizer, "hi", draft_model="tiny")


def test_a_prompt_cache_goes_on_under_another_draft_model() -> None:
    model, tokenizer = scripted_engine(tokenizer=_never_ending())
    cache, plain = ts.make_prompt_cache(model), ts.make_prompt_cache(model)
    drafts = [None, *(scripted_engine(tokenizer=_never_ending()).model for _ in range(2)), None]
    for draft in drafts:
        out = ts.generate(
            model, tokenizer, "hi", max_tokens=9, prompt_cache=cache, draft_model=draft
        )
        expected = ts.generate(model, tokenizer, "hi", max_tokens=9, prompt_cache=plain)
        assert out.token_ids == expected.token_ids
        assert out.reused_tokens == expected.reused_tokens
        assert (out.drafted > 0) == (draft is not None)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied_or_pickled(take: Any) -> None:
    with pytest.raises(UnsupportedError, match="an Engine cannot be copied or pickled"):
        take(scripted_engine())


def test_a_model_goes_with_its_engine_and_conversations_and_waits_for_no_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        engine = drafting_engine(session_slots=2)
        model = weakref.ref(engine.model)
        chat = engine.session()
        for prompt in ("hi", "other", "hi there"):
            engine.generate(prompt, max_tokens=5)
            chat.send(prompt, max_tokens=5)
            engine.session("alice").send(prompt, max_tokens=5)
        engine.session("alice").fork("bob")
        stream = engine.stream("hi", max_tokens=5)
        next(stream)
        del stream, engine
        assert chat.send("still here", max_tokens=3).reused_tokens > 0
        assert model() is not None
        del chat
        assert model() is None
    finally:
        gc.enable()


def test_load_refuses_unknown_and_unbuilt_options_before_it_looks_for_files() -> None:
    with pytest.raises(OptionError, match="'max_contxt'; did you mean 'max_context'"):
        ts.load("nowhere/at/all", max_contxt=3)
    with pytest.raises(OptionError, match="kv_bits=8: a quantized KV cache is not built yet"):
        ts.load("nowhere/at/all", kv_bits=8)
    with pytest.raises(OptionError, match="exclude each other"):
        ts.load("nowhere/at/all", policy=ts.KernelPolicy(), threads=2)
    with pytest.raises(OptionError, match="policy of type str"):
        ts.load("nowhere/at/all", policy="host")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="progress=5 is not a function"):
        ts.load("nowhere/at/all", progress=5)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="nowhere/at/all"):
        ts.load("./nowhere/at/all", draft="auto", residency="auto", draft_block=None)


def test_a_worker_thread_may_drive_an_engine_and_a_session() -> None:
    engine = scripted_engine()
    chat = engine.session()
    expected = scripted_engine().generate("hello", max_tokens=6).token_ids
    found: list[Any] = []

    def work() -> None:
        found.append(engine.generate("hello", max_tokens=6).token_ids)
        found.append(chat.send("hello", max_tokens=3).token_ids)
        part = next(engine.stream("hello", max_tokens=2))
        found.append(float(part.logprobs.max().item()))

    engine.generate("warm", max_tokens=2)
    chat.send("first", max_tokens=2)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] == expected
    assert len(found) == 3
    assert chat.send("again", max_tokens=2).reused_tokens > 0


def test_threads_that_share_an_engine_wait_for_each_other() -> None:
    engine = scripted_engine(tokenizer=_never_ending())
    texts = ["one", "two two", "three"]
    expected = [scripted_engine(tokenizer=_never_ending()).generate(t, max_tokens=9) for t in texts]
    found: dict[str, str] = {}

    def work(text: str) -> None:
        for _ in range(5):
            found[text] = engine.generate(text, max_tokens=9)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[text] for text in texts] == expected


def test_every_field_of_a_response_is_documented() -> None:
    documented = GenerationResponse.__doc__ or ""
    for name in (*MLX_LM_FIELDS, *OWN_FIELDS):
        if name not in {"logprobs", "token_ids"}:
            assert f"        {name}:" in documented


def _never_ending() -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset()
    return tokenizer


def test_parts_are_iterators() -> None:
    assert isinstance(scripted_engine().stream("hi"), Iterator)

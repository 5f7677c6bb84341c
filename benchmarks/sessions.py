"""What does a turn of a conversation feed, and how long is the wait for its first token?

    python benchmarks/sessions.py [--turns 12] [--reply 8] [--no-peers] [--json]

On the demo model, in one process: a conversation of some turns; three conversations that take
turns, with three slots for them; and the same three with two slots, where the least recently used
one has to go. The peers run the same token ids: mlx-lm, with one prompt cache that is trimmed to
what the next prompt shares with it, and llama.cpp, whose one context does the same, where
llama_cpp can be imported. A turn should feed the last token of the reply before it and the new
ones (mlx-lm has fed that last token already, at the end of its reply); `beyond` is what the wait
for the first token took beyond their forward pass.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import cpu_decode
import mlx.core as mx

import turbospark as ts
from turbospark.loading.demo import demo_file

OPENINGS = (
    "The history of the steam engine begins in the first century, when",
    "A ring cache keeps the newest rows of a layer, which means that",
    "On a clear night the oldest light that reaches us has travelled",
)
PIECES = (
    " The next question is where it was built.",
    " Nobody knew the reason, although many people asked.",
    " In the following year everything changed again, because",
    " It was cheaper than before.",
)


@dataclass
class Turn:
    """One turn.

    Attributes:
        conversation: which.
        prompt: tokens of the whole text so far.
        new: tokens since the last reply, that reply's last one included.
        fed: tokens that went through the model before the first new one came.
        ttft: seconds until then.
        beyond: of them, those outside the forward pass; None where that is not known.
        evicted: whether another conversation lost its place.
    """

    conversation: int
    prompt: int
    new: int
    fed: int
    ttft: float
    beyond: float | None = None
    evicted: bool = False


Answer = tuple[list[int], Turn]
Reply = Callable[[int, list[int], list[int]], Answer]
"""(conversation, ids so far, ids of the new piece) -> reply, turn."""


def of_result(result: ts.GeneratedText, conversation: int, new: int) -> Answer:
    fed = result.prompt_tokens - result.reused_tokens
    turn = Turn(
        conversation, result.prompt_tokens, new, fed, result.ttft,
        result.ttft - fed / result.prompt_tps, result.evicted,
    )  # fmt: skip
    return result.token_ids, turn


def conversations(engine: ts.Engine, count: int) -> Reply:
    """Named sessions, which are sent the text of each piece."""
    chats: dict[int, ts.Conversation] = {}

    def reply(conversation: int, said: list[int], piece: list[int]) -> Answer:
        chat = chats.setdefault(conversation, engine.session(f"bench {conversation}"))
        text = engine.tokenizer.decode(piece)
        result = chat.send(text, max_tokens=count)
        return of_result(result, conversation, len(piece) + bool(said))

    return reply


def growing_lists(engine: ts.Engine, count: int) -> Reply:
    """Anonymous conversations: every prompt is the whole text as ids."""

    def reply(conversation: int, said: list[int], piece: list[int]) -> Answer:
        result = engine.generate([*said, *piece], max_tokens=count)
        return of_result(result, conversation, len(piece) + bool(said))

    return reply


def mlx_lm_prompt_cache(engine: ts.Engine, count: int) -> Reply:
    """mlx-lm's generation over one prompt cache, trimmed to the common prefix."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

    model = cpu_decode.mlx_lm_model(engine, mx.float32, 32)
    cache, held = make_prompt_cache(model), []

    def reply(conversation: int, said: list[int], piece: list[int]) -> Answer:
        nonlocal cache, held
        prompt = [*said, *piece]
        keep = shared(held[: cache[0].offset], prompt)
        back = cache[0].offset - keep
        if back and can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, back)
        elif back:
            cache, keep = make_prompt_cache(model), 0
        began, tokens, ttft = time.perf_counter(), [], 0.0
        fed = mx.array(prompt[keep:])
        for token, _ in generate_step(fed, model, max_tokens=count, prompt_cache=cache):
            ttft = ttft or time.perf_counter() - began
            tokens.append(int(token))
        held = [*prompt, *tokens]
        turn = Turn(conversation, len(prompt), len(piece) + bool(said), len(prompt) - keep, ttft)
        return tokens, turn

    return reply


def llama_cpp_context(count: int, context: int) -> Reply:
    """llama.cpp's Python binding, which keeps what the next prompt shares with the last."""
    import llama_cpp

    llama_cpp.llama_log_set(cpu_decode.quiet(llama_cpp), ctypes.c_void_p(0))
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = llama_cpp.Llama(
        str(demo_file()), n_ctx=context, n_batch=256, n_threads=threads, n_threads_batch=threads,
        verbose=False,
    )  # fmt: skip
    fed = 0
    evaluate = model.eval

    def counting(tokens: list[int]) -> None:
        nonlocal fed
        fed += len(tokens)
        evaluate(tokens)

    model.eval = counting

    def reply(conversation: int, said: list[int], piece: list[int]) -> Answer:
        nonlocal fed
        prompt = [*said, *piece]
        fed, began, tokens, ttft, first = 0, time.perf_counter(), [], 0.0, 0
        for token in model.generate(prompt, temp=0.0):
            if not tokens:
                ttft, first = time.perf_counter() - began, fed
            tokens.append(token)
            if len(tokens) == count:
                break
        return tokens, Turn(conversation, len(prompt), len(piece) + bool(said), first, ttft)

    return reply


def shared(one: list[int], other: list[int]) -> int:
    """Tokens that two texts begin with; at least one of `other` is left to feed."""
    limit = min(len(one), len(other) - 1)
    return next((at for at in range(limit) if one[at] != other[at]), limit)


def play(engine: ts.Engine, reply: Reply, order: list[int]) -> list[Turn]:
    """Let conversations take turns in the order given."""
    texts: dict[int, list[int]] = {}
    turns: list[Turn] = []
    for number, conversation in enumerate(order):
        said = texts.get(conversation, [])
        piece = (
            engine.tokenizer.encode(PIECES[number % len(PIECES)], add_special_tokens=False)
            if said
            else engine.tokenizer.encode(OPENINGS[conversation])
        )
        answer, turn = reply(conversation, said, piece)
        texts[conversation] = [*said, *piece, *answer]
        turns.append(turn)
    return turns


def show(title: str, rows: dict[str, list[Turn]]) -> None:
    print(f"\n{title}\n")
    print("| engine | fed beyond the new tokens | ms to the first token, median (most) | evicted |")
    print("| --- | ---: | ---: | ---: |")
    for name, turns in rows.items():
        later = [turn for turn in turns if turn.prompt > turn.new] or turns
        again = sum(turn.fed - turn.new for turn in later)
        waits = [1e3 * turn.ttft for turn in later]
        evicted = sum(turn.evicted for turn in turns)
        print(
            f"| {name} | {again} | {statistics.median(waits):.0f} ({max(waits):.0f}) | {evicted} |"
        )


def show_turns(turns: list[Turn]) -> None:
    print("\nEvery turn of turbospark's conversation\n")
    print("| turn | text | new | fed | ms to the first token | of them beyond the pass |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for number, turn in enumerate(turns, 1):
        print(
            f"| {number} | {turn.prompt} | {turn.new} | {turn.fed} | {1e3 * turn.ttft:.1f} | "
            f"{1e3 * (turn.beyond or 0):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=12, help="of the one conversation")
    parser.add_argument("--reply", type=int, default=8, help="tokens of a reply")
    parser.add_argument("--no-peers", action="store_true", help="only turbospark")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    one, three = [0] * options.turns, [0, 1, 2] * 4
    longest = 40 * (options.turns + options.reply)
    found: dict[str, dict[str, list[Turn]]] = {"one": {}, "three": {}, "two slots": {}}
    load = {"max_context": 4096, "draft": "off"}

    engine = ts.load(session_slots=3, **load)
    engine.generate("warm up", max_tokens=2)
    found["one"]["turbospark session"] = play(engine, conversations(engine, options.reply), one)
    engine = ts.load(session_slots=3, **load)
    found["three"]["turbospark, 3 slots"] = play(
        engine, growing_lists(engine, options.reply), three
    )
    engine = ts.load(session_slots=2, **load)
    found["two slots"]["turbospark, 2 slots"] = play(
        engine, growing_lists(engine, options.reply), three
    )
    if not options.no_peers:
        peers: dict[str, Callable[[], Reply]] = {
            "mlx-lm, one prompt cache": lambda: mlx_lm_prompt_cache(engine, options.reply)
        }
        if importlib.util.find_spec("llama_cpp") is not None:
            peers["llama.cpp, one context"] = lambda: llama_cpp_context(options.reply, longest)
        for name, make in peers.items():
            for kind, order in (("one", one), ("three", three)):
                print(f"  {name}: {kind}", file=sys.stderr)
                found[kind][name] = play(engine, make(), order)
                gc.collect()
    if options.json:
        print(json.dumps({
            "kernels": engine.kernels.describe(),
            "reply": options.reply,
            "turns": {
                kind: {name: [asdict(turn) for turn in turns] for name, turns in rows.items()}
                for kind, rows in found.items()
            },
        }))  # fmt: skip
        return
    show_turns(found["one"]["turbospark session"])
    show(f"One conversation of {options.turns} turns", found["one"])
    show("Three conversations in turn", found["three"])
    show("Three conversations in turn where two have room", found["two slots"])


if __name__ == "__main__":
    main()

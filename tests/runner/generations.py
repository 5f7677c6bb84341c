"""Whole generations over the real runner and a scripted model."""

from collections.abc import Iterator
from typing import Any

from runner.drafting import PROMPT, VOCAB, looping

from turbospark.runner.generation import admit, collect, run
from turbospark.runner.options import read_options
from turbospark.runner.results import GeneratedText, GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.sessions.session import Session
from turbospark.speculation.ngram import NgramDrafter
from turbospark.testing import ByteTokenizer, ScriptedDrafter, ScriptedModel

KINDS = ["perfect", "useless", "alternating", "perfect block", "alternating block", "ngram"]
CONTEXT = 120
STEP_BACK = {kind: int(kind in ("perfect", "useless", "alternating")) for kind in KINDS}
"""Tokens that a drafter wants fed again after a rewind."""


def make(kind: Any, *, recurrent: int = 0, reach: int | None = None, **more: Any) -> Runner:
    """A runner over a scripted model; `kind` names its drafter, or is it; None is none."""
    model = ScriptedModel(looping, vocab_size=VOCAB, recurrent=recurrent, reach=reach)
    drafter: Any = None if isinstance(kind, str) else kind
    if kind == "ngram":
        drafter = NgramDrafter(least=2)
    elif isinstance(kind, str):
        quality: Any = kind.split()[0]
        drafter = ScriptedDrafter(looping, quality, block_passes=kind.endswith("block"))
    session = Session(lambda: model.make_caches(CONTEXT, 0), CONTEXT)
    return Runner(model, session, drafter, **{"prefix_reuse": True, **more})


def stream(
    runner: Runner,
    prompt: list[int] = PROMPT,
    *,
    stop_ids: frozenset[int] = frozenset(),
    **given: Any,
) -> Iterator[GenerationResponse]:
    options = read_options({"max_tokens": 25, **given})
    generation = admit(runner, ByteTokenizer(), prompt, options, stop_ids=stop_ids, chunk=3)
    return run(runner, generation)


def text(runner: Runner, prompt: list[int] = PROMPT, **given: Any) -> GeneratedText:
    return collect(stream(runner, prompt, **given))


def assert_drafter_follows(runner: Runner) -> None:
    """The drafter's rows are those of one that has seen all that was fed, in one go."""
    drafter, state = runner.drafter, runner.session.drafter_state
    if isinstance(drafter, ScriptedDrafter):
        assert state.covered == runner.session.position
        rows = drafter.rows_of(runner.session.fed_ids.ids)
        assert state.rows == rows[: len(state.rows)]
        assert len(state.rows) >= len(rows) - 1

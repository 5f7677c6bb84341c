"""Models for your tests and ours; no downloads.

With weights, `synthetic` writes a small checkpoint of any family::

    @pytest.fixture(scope="session")
    def engine(tmp_path_factory):
        return ts.load(synthetic(tmp_path_factory.mktemp("model"), "moe"))

Without weights, fakes speak turbospark's protocols.

A generation without weights is a `ScriptedModel` behind a runner; with a drafter::

    model = ScriptedModel(recurrent=1)  # its logits depend on every token before
    drafter = ScriptedDrafter(model.logits_of, "alternating")
    runner = scripted_runner(model, drafter, slots=2)

The model raises where caches or recurrent states have come apart from the tokens fed. The drafter
raises where a step is off its cursor, where rows are skipped or given twice, and where a row is
not that of its token; `drafter.rows_of(ids)` is what a fully primed one has written, to be held
against `runner.session.drafter_state.rows`.

Loops can be tested without a runner too: `ScriptedProducer` takes one token a time,
`ScriptedSpeculator` also takes chunks, drafts, verifies and rolls back. Both raise AssertionError
off the cursor; `furthest` is their high-water mark, which a context must bound.
"""

from turbospark.testing.caches import ScriptedCache, ScriptedRows, scripted_recurrent_cache
from turbospark.testing.checkpoint import write_tiny_checkpoint
from turbospark.testing.drafters import ScriptedDrafter, ScriptedDrafterState
from turbospark.testing.engine import scripted_engine
from turbospark.testing.models import (
    ScriptedModel,
    fingerprints,
    hashed_logits,
    scripted_logits,
)
from turbospark.testing.producers import ScriptedProducer, ScriptedSpeculator
from turbospark.testing.runner import scripted_runner
from turbospark.testing.synthetic import synthetic
from turbospark.testing.text import ByteDetokenizer, ByteTokenizer

__all__ = [
    "ByteDetokenizer",
    "ByteTokenizer",
    "ScriptedCache",
    "ScriptedDrafter",
    "ScriptedDrafterState",
    "ScriptedModel",
    "ScriptedProducer",
    "ScriptedRows",
    "ScriptedSpeculator",
    "fingerprints",
    "hashed_logits",
    "scripted_engine",
    "scripted_logits",
    "scripted_recurrent_cache",
    "scripted_runner",
    "synthetic",
    "write_tiny_checkpoint",
]

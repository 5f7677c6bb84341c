"""Fakes that speak turbospark's protocols, for your tests and ours; no weights, no downloads."""

from turbospark.testing.checkpoint import write_tiny_checkpoint
from turbospark.testing.engine import scripted_engine
from turbospark.testing.models import (
    ScriptedCache,
    ScriptedModel,
    ScriptedProducer,
    hashed_logits,
    scripted_logits,
)
from turbospark.testing.text import ByteDetokenizer, ByteTokenizer

__all__ = [
    "ByteDetokenizer",
    "ByteTokenizer",
    "ScriptedCache",
    "ScriptedModel",
    "ScriptedProducer",
    "hashed_logits",
    "scripted_engine",
    "scripted_logits",
    "write_tiny_checkpoint",
]

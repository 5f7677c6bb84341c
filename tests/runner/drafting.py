"""Generations with and without a drafter over scripted producers."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from turbospark.runner.loops import decode, prefill
from turbospark.runner.sink import TokenSink, never
from turbospark.runner.speculative import Drafting
from turbospark.runner.token_step import Step
from turbospark.sampling.select import Chooser
from turbospark.settings import GenerationConfig
from turbospark.speculation.adaptive import BlockPolicy, FixedBlock
from turbospark.speculation.ngram import NgramDrafter
from turbospark.testing import ByteDetokenizer, ScriptedProducer, ScriptedSpeculator

VOCAB = 23
PROMPT = [5, 6, 7, 8, 9, 10, 11]
KINDS = [
    "perfect", "useless", "alternating", "perfect block", "useless block", "alternating block",
    "ngram",
]  # fmt: skip


SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 4}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4,
}  # fmt: skip


def looping(ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logits that look little further back than one token, so that a text soon comes round."""
    seed = zlib.crc32(np.array([ids[-1], sum(ids[-2:-1]) % 3], dtype=np.int32).tobytes())
    return np.random.default_rng(seed).normal(scale=3.0, size=VOCAB)


class LookupSpeculator(ScriptedSpeculator):
    """Drafts by looking the text up."""

    def __init__(self, logits_of: Callable[..., Any], least: int = 2) -> None:
        super().__init__(logits_of, block_passes=True)
        self.drafter = NgramDrafter(least=least)
        self.state = self.drafter.new_state(99)

    def draft_block(self, anchor: int, base: int, block: int) -> list[int]:
        super().draft_block(anchor, base, block)
        return self.drafter.block(self.state, self.recorded, anchor, block)


def speculator(kind: str, logits_of: Callable[..., Any] = looping) -> ScriptedSpeculator:
    """A scripted producer with a drafter of some kind."""
    if kind == "ngram":
        return LookupSpeculator(logits_of)
    quality: Any = kind.split()[0]
    return ScriptedSpeculator(logits_of, quality, block_passes=kind.endswith("block"))


class Run:
    """One generation, ready to be stepped.

    Args:
        producer: advanced.
        block: proposals of a round, a policy, or 0 for plain decoding.
        prompt: its ids.
        tokens: the budget.
        context: rows the producer holds at most; by default what prompt and budget need.
        sink: more of `TokenSink`'s arguments.
        more: of `Chooser`'s: processors, sampler, logit_bias.
        options: sampling options.
    """

    def __init__(
        self,
        producer: ScriptedProducer,
        block: int | BlockPolicy,
        *,
        prompt: Sequence[int] = PROMPT,
        tokens: int = 23,
        context: int | None = None,
        sink: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
        vocab: int = VOCAB,
        **options: Any,
    ) -> None:
        self.producer = producer
        self.chooser = Chooser(GenerationConfig(**options), vocab, **(more or {}))
        extra = {"cancelled": never, **(sink or {})}
        self.sink = TokenSink(prompt, ByteDetokenizer(), max_tokens=tokens, **extra)
        self.drafting = None
        if block:
            assert isinstance(producer, ScriptedSpeculator)
            self.drafting = Drafting(
                producer,
                self.chooser,
                FixedBlock(block) if isinstance(block, int) else block,
                max_context=len(prompt) + tokens if context is None else context,
                vocab_size=vocab,
            )
        filled = prefill(producer, prompt)
        assert filled.logits is not None
        self.steps: Iterator[Step] = decode(
            producer, filled.logits, self.chooser, self.sink, self.drafting
        )

    def tokens(self) -> list[int]:
        """Run to the end; the tokens of it."""
        return [step.committed.token for step in self.steps]


def plain(logits_of: Callable[..., Any] = looping, **options: Any) -> list[Step]:
    """The steps of plain decoding."""
    return list(Run(ScriptedProducer(logits_of), 0, **options).steps)


def tokens_of(steps: Sequence[Step]) -> list[int]:
    """Their tokens."""
    return [step.committed.token for step in steps]


def assert_settled(run: Run, given: int, text: list[int]) -> None:
    """The producer was fed the prompt and every token given but the last."""
    producer = run.producer
    assert isinstance(producer, ScriptedSpeculator)
    expected = [*PROMPT, *text[: max(given - 1, 0)]]
    assert producer.fed == expected
    assert producer.recorded == expected
    assert producer.drafter_cursor in (len(expected), len(expected) - 1)

"""Drafters and callers that go wrong inside a round."""

from typing import Any

import mlx.core as mx
import pytest
from runner.drafting import (
    PROMPT,
    VOCAB,
    Run,
    assert_settled,
    looping,
    plain,
    speculator,
    tokens_of,
)

from turbospark.errors import NonFiniteError, OptionError, ProducerError
from turbospark.testing import ScriptedSpeculator


class Scripted(ScriptedSpeculator):
    """A drafter that goes wrong in a way that is named."""

    def __init__(self, fault: str) -> None:
        super().__init__(looping, block_passes=fault in ("outside", "longer"))
        self.fault = fault
        self.verified = 0

    def draft_step(self, token: int, position: int) -> mx.array:
        if self.fault == "first step fails":
            raise RuntimeError(self.fault)
        logits = super().draft_step(token, position)
        if len(self._chain) > 1 and self.fault == "later step fails":
            raise RuntimeError(self.fault)
        return {"nan": logits * float("nan"), "wide": mx.zeros(VOCAB + 2)}.get(self.fault, logits)

    def draft_block(self, anchor: int, base: int, block: int) -> list[int]:
        proposals = super().draft_block(anchor, base, block)
        return [VOCAB, *proposals[1:]] if self.fault == "outside" else [*proposals, 1]


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("first step fails", RuntimeError, "first step"),
        ("later step fails", RuntimeError, "later step"),
        ("nan", NonFiniteError, "the drafter failed: .*position 8 hold NaN"),
        ("wide", ProducerError, r"shape \(25,\), not \(23,\)"),
        ("outside", ProducerError, "token 23; ids run from 0 to 22"),
        ("longer", ProducerError, "4 tokens where 3 may be"),
    ],
)
def test_a_drafter_that_goes_wrong_is_named_and_leaves_the_target_where_it_was(
    fault: str, kind: type[Exception], message: str
) -> None:
    text = tokens_of(plain())
    run = Run(Scripted(fault), 3)
    next(run.steps)
    with pytest.raises(kind, match=message):
        next(run.steps)
    assert_settled(run, 1, text)


@pytest.mark.parametrize("kind", ["perfect", "perfect block"])
def test_a_row_that_cannot_be_judged_leaves_the_tokens_before_it_settled(kind: str) -> None:
    def fail(tokens: mx.array, logits: mx.array) -> Any:
        return None if tokens.size == len(PROMPT) + 5 and armed else logits

    text, armed = tokens_of(plain()), False
    run = Run(speculator(kind), 3, more={"processors": [fail]})
    given = [next(run.steps).committed.token for _ in range(4)]
    armed = True
    with pytest.raises(OptionError, match="a logits processor gave NoneType"):
        given.extend(step.committed.token for step in run.steps)
    assert given == text[: len(given)]
    producer = run.producer
    assert isinstance(producer, ScriptedSpeculator)
    assert producer.fed == producer.recorded == [*PROMPT, *text][: len(producer.fed)]
    producer.produce(3, len(producer.fed))

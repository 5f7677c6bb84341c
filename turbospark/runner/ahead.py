"""Decoding one step ahead: while the host takes a token in, the device computes the next."""

from collections.abc import Generator
from typing import NoReturn, Protocol, cast

import mlx.core as mx

from turbospark.protocols import RollbackPoint, Verified
from turbospark.runner.sink import TokenSink
from turbospark.runner.token_step import Step, Stopwatch
from turbospark.sampling.device import NOTHING, DevicePicker
from turbospark.sampling.select import Choice


class AheadProducer(Protocol):
    """A producer that takes a token which the host has not seen yet."""

    def launch(self, token: mx.array, base: int) -> Verified:
        """Begin the pass of a token [1] at `base`, the cursor; it is an open round."""
        ...

    def checkpoint(self) -> RollbackPoint:
        """Where the target stands."""
        ...

    def rollback(self, point: RollbackPoint) -> None:
        """Take the target back to a point."""
        ...

    def record_committed(self, tokens: list[int], start: int, verified: Verified) -> None:
        """Note the token that was launched."""
        ...

    def refuse_row(self, position: int) -> NoReturn:
        """Taint the session and raise for logits of `position` that are not finite."""
        ...


def decode_ahead(
    producer: AheadProducer, logits: mx.array, picker: DevicePicker, sink: TokenSink
) -> Generator[Step]:
    """Sample on the device and feed one step ahead until the sink says why to end.

    Closed at any token, the tokens fed are the prompt and every token before the one just given:
    what was launched beyond is taken back.

    Args:
        producer: advanced by every token but the last.
        logits: [V] of the prompt's last token.
        picker: chooses tokens where the logits are.
        sink: takes them; `sink.history` is what was fed.
    """
    watch = Stopwatch()
    row = logits[None]
    token = picker.pick(row, 0)
    while True:
        base, following = len(sink.history), None
        launched: Verified | None = None
        point = producer.checkpoint()
        if sink.remaining > 1:
            launched = producer.launch(token, base)
            following = picker.pick(launched.logits, sink.generated + 1)
            mx.async_eval(following)  # pyright: ignore[reportUnknownMemberType]
        try:
            chosen = int(cast(int, token.item()))
            if chosen == NOTHING:
                producer.refuse_row(base - 1)
            committed = sink.commit(chosen)
            yield Step(committed, Choice(chosen, row[0]), watch.pause())
            watch.resume()
            if committed.reason is not None:
                return
            assert launched is not None
            assert following is not None
            verified, launched = launched, None
            producer.record_committed([chosen], base, verified)
        finally:
            if launched is not None:
                producer.rollback(point)
        row, token = verified.logits, following

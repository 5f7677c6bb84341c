"""Decoding one step ahead: while the host takes a token in, the device computes the next."""

from collections.abc import Generator
from typing import cast

import mlx.core as mx

from turbospark.protocols import Verified
from turbospark.runner.runner import Runner
from turbospark.runner.sink import TokenSink
from turbospark.runner.token_step import Step, Stopwatch
from turbospark.sampling.device import NOTHING, DevicePicker
from turbospark.sampling.select import Choice


def decode_ahead(
    runner: Runner, logits: mx.array, picker: DevicePicker, sink: TokenSink
) -> Generator[Step]:
    """Sample on the device and feed one step ahead until the sink says why to end.

    Closed at any token, the tokens fed are the prompt and every token before the one just given:
    what was launched beyond is taken back.

    Args:
        runner: advanced by every token but the last.
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
        point = runner.checkpoint()
        if sink.remaining > 1:
            launched = runner.launch(token, base)
            following = picker.pick(launched.logits, sink.generated + 1)
            mx.async_eval(following)  # pyright: ignore[reportUnknownMemberType]
        try:
            chosen = int(cast(int, token.item()))
            if chosen == NOTHING:
                runner.refuse_row(base - 1)
            committed = sink.commit(chosen)
            yield Step(committed, Choice(chosen, row[0]), watch.pause())
            watch.resume()
            if committed.reason is not None:
                return
            assert launched is not None
            assert following is not None
            verified, launched = launched, None
            runner.record_committed([chosen], base, verified)
        finally:
            if launched is not None:
                runner.rollback(point)
        row, token = verified.logits, following

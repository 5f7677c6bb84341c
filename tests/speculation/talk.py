"""A conversation that a drafter follows, over a target that computes nothing.

Hidden rows and streams are random numbers that the whole text before a row determines, so a row
that is kept where it should not be, or missed, or given for another text, changes what is drafted.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from golden.drafter_fixtures import drafter_module
from golden.fixtures import kernel_sets
from golden.tiny import tiny_model

from turbospark.protocols import ForwardOutput
from turbospark.speculation.dflash import DFlashDrafter
from turbospark.speculation.model import ModelDrafter
from turbospark.speculation.mtp import MTPDrafter

WIDTH = 96  # of the golden trunk
VOCAB = 60  # ids that every drafter here knows
CONTEXT = 640
SHALLOW: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
PROBE = (11, 5, 17)  # tokens that opinions are asked along


def drafters() -> dict[str, Any]:
    """One drafter of every kind, over tiny random weights."""
    host = kernel_sets().get("host")
    written_in_place = {"mtp on the host": MTPDrafter(drafter_module("qwen3_5_mtp", host))}
    return (written_in_place if host else {}) | {
        "mtp": MTPDrafter(drafter_module("qwen3_5_mtp")),
        "mtp of experts": MTPDrafter(drafter_module("qwen3_5_moe_mtp")),
        "dflash2": DFlashDrafter(drafter_module("dflash2"), slack=5),
        "dflash1": DFlashDrafter(drafter_module("dflash1"), slack=5),
        "llama": ModelDrafter(tiny_model("llama"), 67),
        "windowed": ModelDrafter(tiny_model("mistral"), 67),
        "recurrent": ModelDrafter(tiny_model("qwen3_5", **SHALLOW), 67),
    }


class Talk:
    """What a session and its target do to a drafter's state."""

    def __init__(self, drafter: Any, state: Any = None, ids: Sequence[int] = ()) -> None:
        self.drafter = drafter
        self.state = drafter.new_state(CONTEXT) if state is None else state
        self.ids = list(ids)

    def output(self, start: int) -> ForwardOutput:
        """The target's rows from `start` on."""
        rows = {
            name: mx.array(np.stack([row(self.ids[: i + 1], name) for i in self._span(start)]))
            for name in (*self.drafter.taps, "hidden")
        }
        return ForwardOutput(None, {tap: rows[tap] for tap in self.drafter.taps}, rows["hidden"])

    def feed(self, tokens: Sequence[int]) -> None:
        """A pass over tokens."""
        start = len(self.ids)
        self.ids.extend(tokens)
        self.drafter.observe(self.state, self.ids, start, self.output(start))

    def round(self, anchor: int, count: int, keep: int) -> None:
        """Draft `count` tokens behind `anchor`, and keep `keep` rows of what was verified."""
        base, proposals = len(self.ids), list[int]()
        if self.drafter.block_passes:
            proposals = self.drafter.block(self.state, self.ids, anchor, count)
        else:
            for step in range(count):
                token = proposals[-1] if proposals else anchor
                logits = self.drafter.step(self.state, token, base - 1 + step)
                proposals.append(int(mx.argmax(logits[:VOCAB]).item()))
        self.state.rewind(base)
        self.feed([anchor, *(token % VOCAB for token in proposals)][:keep])

    def back(self, keep: int, mark: Any = None) -> int:
        """Go back to `keep` tokens; what lies behind the drafter's own position is fed again."""
        position = self.state.resume_at(keep, mark)
        self.state.rewind(position, mark)
        again = self.ids[position:keep]
        del self.ids[position:]
        if again:
            self.feed(again)
        return position

    def fork(self) -> "Talk":
        return Talk(self.drafter, self.state.fork(), self.ids)

    def saved(self) -> "Talk":
        """Another talk that goes on from this one's arrays."""
        twin = Talk(self.drafter, None, self.ids)
        twin.state.restore(self.state.export())
        return twin

    def fresh(self) -> "Talk":
        """A talk that was given the whole text in one pass and has drafted nothing."""
        twin = Talk(self.drafter)
        twin.feed(self.ids)
        return twin

    def opinions(self) -> np.ndarray:
        """What it would draft next; the state stays as it is."""
        state = self.state.fork()
        if self.drafter.block_passes:
            self.drafter.prime(state, self.ids, PROBE[0])
            tokens, hidden = self.drafter.module.propose(PROBE[0], state.caches)
            mx.eval(tokens)
            return np.array(hidden)
        first = len(self.ids) - 1
        rows = [self.drafter.step(state, token, first + i) for i, token in enumerate(PROBE)]
        return np.stack([np.array(row) for row in rows])

    def _span(self, start: int) -> range:
        return range(start, len(self.ids))


def row(ids: Sequence[int], name: int | str) -> np.ndarray:
    """A row [WIDTH] float32 that the text determines."""
    seed = zlib.crc32(np.array(ids, dtype=np.int32).tobytes(), zlib.crc32(str(name).encode()))
    return np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()

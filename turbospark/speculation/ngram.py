"""Drafting by lookup: what followed the same tokens the last time follows again.

A match needs `least` tokens at the least. Shorter ones are found all over structured text (`",`
in JSON, `self.` in code) and say nothing about what follows.
"""

from array import array
from collections.abc import Mapping, Sequence

import mlx.core as mx

from turbospark.errors import OptionError, ProducerError
from turbospark.protocols import ForwardOutput
from turbospark.speculation.off import refuse_arrays

_LOOKED_AT = 64  # places with the same last tokens that are compared, the newest first
_NONE = -1


class NgramIndex:
    """Where every run of `least` tokens ended, over a text that grows and is cut.

    Args:
        least: tokens of a run.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._newest: dict[tuple[int, ...], int] = {}
        self._before = array("i")  # by end, where the same run ended before that; or _NONE
        self.ids = array("i")

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.ids.append(token)
            run = self._run(len(self.ids))
            self._before.append(_NONE if run is None else self._newest.get(run, _NONE))
            if run is not None:
                self._newest[run] = len(self.ids)

    def cut(self, length: int) -> None:
        """Forget all tokens beyond `length`."""
        while len(self.ids) > length:
            run = self._run(len(self.ids))
            before = self._before.pop()
            if run is not None and before == _NONE:
                del self._newest[run]
            elif run is not None:
                self._newest[run] = before
            self.ids.pop()

    def copy(self) -> "NgramIndex":
        """An independent index over the same text."""
        twin = NgramIndex(self._least)
        twin._newest = dict(self._newest)
        twin._before, twin.ids = array("i", self._before), array("i", self.ids)
        return twin

    def followers(self, most: int, count: int) -> list[int]:
        """What followed the longest earlier run that equals the text's end.

        Args:
            most: tokens that are compared at most.
            count: tokens wanted.

        Returns:
            `count` tokens, or none without a match. A match that reaches the end goes on with
            what it just gave: a text of period 3 continues as such.
        """
        place = self._longest_match(most)
        if place == _NONE:
            return []
        text = array("i", self.ids[place:])
        for index in range(count):
            text.append(text[index])
        return list(text[-count:])

    def _longest_match(self, most: int) -> int:
        end = len(self.ids)
        best, best_length = _NONE, 0
        place = self._before[end - 1] if end else _NONE
        for _ in range(_LOOKED_AT):
            if place == _NONE or best_length >= most:
                break
            length = self._common_length(place, most)
            if length > best_length:
                best, best_length = place, length
            place = self._before[place - 1]
        return best

    def _common_length(self, place: int, most: int) -> int:
        ids, end = self.ids, len(self.ids)
        length = self._least
        while length < min(most, place) and ids[place - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length

    def _run(self, end: int) -> tuple[int, ...] | None:
        return tuple(self.ids[end - self._least : end]) if end >= self._least else None

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens and links, and about that of the table of runs."""
        return 8 * len(self.ids) + (56 + 8 * self._least) * len(self._newest)


class NgramState:
    """An index over the tokens that were fed. It misses none: what it lacks it reads up."""

    def __init__(self, index: NgramIndex) -> None:
        self.index = index

    @property
    def cursor(self) -> int:
        """Tokens indexed."""
        return len(self.index.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return self.index.nbytes

    def fork(self) -> "NgramState":
        """An independent state over the same text."""
        return NgramState(self.index.copy())

    def mark(self) -> None:
        """Nothing beside the text is needed."""

    def resume_at(self, keep: int, mark: object = None) -> int:
        """Anywhere."""
        return keep

    def rewind(self, position: int, mark: object = None) -> None:
        """Forget the tokens beyond `position`."""
        self.index.cut(position)

    def export(self) -> dict[str, mx.array]:
        """No arrays: the fed tokens are in the file anyhow."""
        return {}

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take no arrays; the tokens are read up when they are next asked for."""
        refuse_arrays("n-gram lookup", arrays)
        self.index.cut(0)


class NgramDrafter:
    """Proposes what followed the longest earlier match of the text's end.

    Args:
        least: tokens that have to match.
        most: tokens that are compared; among equally long matches the newest counts.
        max_block: proposals of a round at most.
    """

    name = "ngram"
    block_passes = True
    hidden = False
    taps: tuple[int, ...] = ()

    def __init__(self, *, least: int = 3, most: int = 8, max_block: int = 8) -> None:
        if not 1 <= least <= most:
            raise OptionError(f"n-grams of {least} to {most} tokens: 1 <= least <= most is needed")
        if max_block < 1:
            raise OptionError(f"max_block={max_block}: at least 1 proposal a round is needed")
        self.least = least
        self.most = most
        self.max_block = max_block

    def __repr__(self) -> str:
        return f"NgramDrafter(least={self.least}, most={self.most}, max_block={self.max_block})"

    def new_state(self, max_context: int) -> NgramState:
        """An empty index."""
        return NgramState(NgramIndex(self.least))

    def observe(
        self, state: NgramState, ids: Sequence[int], start: int, output: ForwardOutput
    ) -> None:
        """Index the tokens that were fed."""
        self._follow(state, ids)

    def prime(self, state: NgramState, ids: Sequence[int], anchor: int) -> None:
        """Index the tokens that were fed; the anchor is not among them yet."""
        self._follow(state, ids)

    def step(self, state: NgramState, token: int, position: int) -> mx.array:
        """Refused: lookup has no logits."""
        raise ProducerError("n-gram lookup proposes whole blocks and has no draft step")

    def block(self, state: NgramState, ids: Sequence[int], anchor: int, count: int) -> list[int]:
        """What followed the last time; nothing without a match."""
        if not 1 <= count <= self.max_block:
            raise ProducerError(f"{count} proposals were asked of {self!r}")
        self._follow(state, ids)
        index = state.index
        index.extend([anchor])
        try:
            return index.followers(self.most, count)
        finally:
            index.cut(len(ids))

    def _follow(self, state: NgramState, ids: Sequence[int]) -> None:
        index = state.index
        index.cut(len(ids))
        index.extend(ids[len(index.ids) :])

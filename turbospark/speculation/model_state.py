"""What a draft model remembers of one conversation."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.caches.parts import export_parts, split_parts
from turbospark.caches.rollback import checkpoint, max_row_rewind, rollback
from turbospark.errors import CheckpointError
from turbospark.protocols import RollbackPoint
from turbospark.speculation.captures import (
    export_caches,
    ids_array,
    ids_of,
    restore_caches,
)


@dataclass(frozen=True, slots=True, eq=False)
class ModelMark:
    """The draft model's recurrent states at some position, by reference."""

    point: RollbackPoint

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(item.nbytes for state in self.point.recurrent.values() for item in state)


class ModelState:
    """Caches of the draft model over one conversation.

    Args:
        make_caches: gives empty caches.

    Attributes:
        caches: they hold `fed`, whatever has become of these tokens since.
        fed: tokens in the caches.
        ids: tokens the target was fed.
        chain: tokens of the draft steps since; the first stands behind `ids`.
        points: positions of the text that recurrent caches can go back to.
    """

    def __init__(self, make_caches: Callable[[], list[Any]]) -> None:
        self._make_caches = make_caches
        self.caches = make_caches()
        self.fed = array("i")
        self.ids = array("i")
        self.chain: list[int] = []
        self.points: list[RollbackPoint] = []
        self._agreed = 0

    @property
    def cursor(self) -> int:
        """The position before that of the next token it wants."""
        return max(0, len(self.ids) + len(self.chain) - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def is_recurrent(self) -> bool:
        """Whether some of its caches go back to checkpoints only."""
        return any(cache.recurrent for cache in self.caches)

    def fork(self) -> "ModelState":
        """An independent state; rows are shared until one side writes."""
        twin = ModelState(self._make_caches)
        twin.caches = [cache.fork() for cache in self.caches]
        twin.fed, twin.ids = array("i", self.fed), array("i", self.ids)
        twin.chain, twin.points, twin._agreed = [*self.chain], [*self.points], self._agreed
        return twin

    def mark(self) -> ModelMark | None:
        """The recurrent states, where the caches hold nothing but the text; None if they do."""
        agreed = self.agree()
        if not self.is_recurrent or agreed < len(self.fed) or agreed > len(self.ids):
            return None
        return ModelMark(checkpoint(self.caches))

    def resume_at(self, keep: int, mark: ModelMark | None = None) -> int:
        """Anywhere: it reads up what it lacks."""
        return keep

    def rewind(self, position: int, mark: ModelMark | None = None) -> None:
        """Forget the tokens from `position` on; the caches follow when they are next needed."""
        del self.ids[position:]
        self.end_chain()
        self.points = [point for point in self.points if point.position <= position]
        if mark is not None and mark.point.position <= position:
            self.points.append(mark.point)

    def export(self) -> dict[str, mx.array]:
        """Caches, the tokens in them, and the text."""
        text = {"fed": ids_array(self.fed), "text": ids_array(self.ids)}
        return export_parts(export_caches(self.caches) | text)

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave.

        Raises:
            CheckpointError: it is of another model, or damaged; nothing has changed.
        """
        parts = split_parts(arrays)
        fed = ids_of(parts.pop("fed", {}), "the tokens fed")
        ids = ids_of(parts.pop("text", {}), "the text")
        caches = self._make_caches()
        if restore_caches(caches, parts) != len(fed) or parts:
            raise CheckpointError(
                f"the draft model's arrays contradict one another: {len(fed)} tokens, caches at "
                f"{caches[0].offset}, and {sorted(parts)}"
            )
        self.caches, self.fed, self.ids = caches, array("i", fed), array("i", ids)
        self.chain, self.points, self._agreed = [], [], 0

    def end_chain(self) -> None:
        """Forget the tokens of draft steps; what the caches hold of them is compared anew."""
        self.chain = []
        self._agreed = min(self._agreed, len(self.ids))

    def text(self, start: int) -> list[int]:
        """What stands from position `start` on, draft steps included."""
        known = len(self.ids)
        return [*self.ids[start:], *self.chain] if start < known else self.chain[start - known :]

    def agree(self) -> int:
        """How many tokens of the caches are those of the text."""
        text = self.text(self._agreed)
        for fed, wanted in zip(self.fed[self._agreed :], text, strict=False):
            if fed != wanted:
                break
            self._agreed += 1
        return self._agreed

    def settle(self, most: int) -> None:
        """Take the caches back to where they agree with the text, and hold `most` at most.

        Recurrent ones go to a point before that; where there is none, or rows are gone, the
        caches are emptied.
        """
        agreed = min(self.agree(), most)
        if agreed == len(self.fed):
            return
        points = [RollbackPoint(agreed)]
        if self.is_recurrent:
            points = [point for point in self.points if point.position <= agreed]
        best = max(points, key=lambda point: point.position, default=None)
        if best is None or len(self.fed) - best.position > max_row_rewind(self.caches):
            self.clear()
            return
        rollback(self.caches, best)
        del self.fed[best.position :]
        self._agreed = best.position

    def clear(self) -> None:
        """Empty the caches; the text stays."""
        self.caches, self._agreed, self.points = self._make_caches(), 0, []
        del self.fed[:]

    def note(self, tokens: Sequence[int]) -> None:
        """Count tokens of the text that the caches have taken."""
        self.fed.extend(tokens)
        self._agreed = len(self.fed)

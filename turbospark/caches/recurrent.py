"""The memory of a recurrent layer: a state that every step folds the new tokens into."""

import copy
from collections.abc import Callable, Mapping
from typing import Self, cast

import mlx.core as mx

from turbospark.errors import CheckpointError, ContextLengthError, RewindError, ShapeError

State = tuple[mx.array, ...]


class RecurrentCache:
    """A layer's state after `offset` tokens, as values.

    A step replaces the state and never writes into it, so a reference that was kept is a
    checkpoint for free. There is no way back to an earlier position but such a checkpoint.

    Args:
        initial: makes the state of position 0; called where one is needed, never before.
        max_context: tokens the session may hold.
    """

    recurrent = True
    """Whether `place` rather than `rewind` goes back."""

    def __init__(self, initial: Callable[[], State], max_context: int) -> None:
        self.max_context = max_context
        self._initial = initial
        self._state: State | None = None
        self._offset = 0

    def __repr__(self) -> str:
        return f"RecurrentCache(max_context={self.max_context})"

    @property
    def offset(self) -> int:
        """Tokens folded in so far; also the position of the next one."""
        return self._offset

    @property
    def state(self) -> State:
        """The state after `offset` tokens. Nobody may write into these arrays."""
        if self._state is None:
            self._state = self._initial()
        return self._state

    @property
    def nbytes(self) -> int:
        """Bytes of the state; 0 until it was first asked for."""
        return sum(array.nbytes for array in self._state or ())

    def advance(self, count: int, state: State) -> None:
        """Stand `count` tokens further, with the state that a step has made of them.

        Raises:
            ContextLengthError: offset + count exceeds max_context; nothing has changed.
            ShapeError: the state is not of this layer's shapes; nothing has changed.
        """
        if self._offset + count > self.max_context:
            raise ContextLengthError(
                f"{self!r} at {self._offset} tokens cannot take {count} more: max_context is "
                f"{self.max_context}; load with a larger max_context or shorten the prompt"
            )
        self.place(self._offset + count, state)

    def place(self, offset: int, state: State) -> None:
        """Stand at a position whose state is known: a checkpoint's, or a replayed one.

        Raises:
            ShapeError: the state is not of this layer's shapes; nothing has changed.
        """
        shapes, wanted = _shapes(state), _shapes(self.state)
        if shapes != wanted:
            raise ShapeError(f"{self!r} takes a state of shapes {wanted}, not {shapes}")
        self._offset, self._state = offset, state

    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back: none."""
        return 0

    def rewind(self, count: int) -> None:
        """Take back 0 tokens.

        Raises:
            RewindError: any other count; nothing has moved.
        """
        if count:
            raise RewindError(
                f"{self!r} at {self._offset} tokens cannot rewind by {count}: the state folds all "
                "tokens into one; go back to a checkpoint or prefill again from token 0"
            )

    def fork(self) -> Self:
        """An independent cache with the same state, which is shared until one side steps on."""
        return copy.copy(self)

    def export(self) -> dict[str, mx.array]:
        """The state and its position.

        Returns:
            `offset` [1] int64, and `state0`, `state1`, ... unless nothing was fed.
        """
        arrays = {"offset": mx.array([self._offset], mx.int64)}
        if self._offset:
            arrays |= {f"state{i}": array for i, array in enumerate(self.state)}
        return arrays

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave, of a layer of the same shapes.

        Raises:
            CheckpointError: the arrays are none of a cache like this one; nothing has changed.
        """
        offset = self._exported_offset(arrays)
        wanted = {f"state{i}": array for i, array in enumerate(self._initial())} if offset else {}
        if set(arrays) != {"offset", *wanted}:
            raise CheckpointError(
                f"{self!r} takes {sorted(['offset', *wanted])}, not {sorted(arrays)}"
            )
        for name, array in wanted.items():
            given = arrays[name]
            if given.shape != array.shape or given.dtype != array.dtype:
                raise CheckpointError(
                    f"{self!r} holds {name} as {array.shape} {array.dtype}, not as {given.shape} "
                    f"{given.dtype}"
                )
        self._offset = offset
        self._state = tuple(arrays[name] for name in wanted) if offset else None

    def _exported_offset(self, arrays: Mapping[str, mx.array]) -> int:
        given = arrays.get("offset")
        if given is None or given.shape != (1,) or given.dtype != mx.int64:
            raise CheckpointError(f"{self!r} is given arrays {sorted(arrays)} of another cache")
        (offset,) = cast("list[int]", given.tolist())  # host memory: one number
        if not 0 <= offset <= self.max_context:
            raise CheckpointError(
                f"{self!r} cannot stand at {offset} tokens; load with max_context={offset} or more"
            )
        return offset


def _shapes(state: State) -> list[tuple[int, ...]]:
    return [array.shape for array in state]

"""Values that go with arrays."""

import weakref
from typing import Generic, TypeVar

import mlx.core as mx

Value = TypeVar("Value")


class ByArray(Generic[Value]):
    """A value for each of some arrays: known by the array itself, and gone with it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[mx.array], Value]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, array: mx.array, value: Value) -> None:
        """Keep the value of an array, in place of an earlier one."""
        key, kept = id(array), self._kept

        def forget(_: object) -> None:
            kept.pop(key, None)

        kept[key] = weakref.ref(array, forget), value

    def get(self, array: mx.array) -> Value | None:
        """The value of this very array, or None."""
        reference, value = self._kept.get(id(array), (None, None))
        return value if reference is not None and reference() is array else None

    def take(self, array: mx.array) -> Value | None:
        """The value of this very array, which has none from now on, or None."""
        value = self.get(array)
        self._kept.pop(id(array), None)
        return value

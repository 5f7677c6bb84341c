"""Where a body finds its inputs: most are arguments, some lie in a bundle, some are there twice."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from turbospark.kernels.gpu.bundle import Bundle

_PASSED, _BUNDLED = -1, -2


@dataclass(frozen=True, slots=True)
class Wiring:
    """How a body's inputs are found.

    Attributes:
        pattern: of each input whether it is passed, lies in the bundle, or is the same array as an
            earlier one, by that one's place.
    """

    pattern: tuple[int, ...]

    @classmethod
    def of(
        cls, inputs: Sequence[mx.array], bundle: Bundle | None, strided: Sequence[bool]
    ) -> "Wiring":
        """The wiring of a launch.

        Args:
            inputs: what the body reads.
            bundle: where some of them lie, or None.
            strided: of each whether the body asks for its shape or strides, and so needs it passed.
        """
        pattern, first = list[int](), dict[int, int]()
        for i, array in enumerate(inputs):
            if bundle is not None and bundle.place(array) is not None:
                pattern.append(_BUNDLED)
            elif id(array) in first and not strided[i]:
                pattern.append(first[id(array)])
            else:
                first.setdefault(id(array), i)
                pattern.append(_PASSED)
        return cls(tuple(pattern))

    @property
    def is_plain(self) -> bool:
        """Whether every input is passed."""
        return set(self.pattern) <= {_PASSED}

    def names(self, inputs: Sequence[str]) -> list[str]:
        """The names of what is passed, given all names."""
        own = [name for name, at in zip(inputs, self.pattern, strict=True) if at == _PASSED]
        return [*own, *(["bundle"] if _BUNDLED in self.pattern else [])]

    def passed(self, inputs: Sequence[mx.array], bundle: Bundle | None) -> list[mx.array]:
        """The arrays that are passed, given all arrays."""
        own = [array for array, at in zip(inputs, self.pattern, strict=True) if at == _PASSED]
        return own if bundle is None or _BUNDLED not in self.pattern else [*own, bundle.words]

    def values(
        self, names: Sequence[str], inputs: Sequence[mx.array], bundle: Bundle | None
    ) -> dict[str, int]:
        """Template values: the places in the bundle, and one that tells this wiring from others."""
        if self.is_plain:
            return {}
        text = ",".join(map(str, self.pattern)).encode()
        made = {"WIRING": zlib.crc32(text) >> 1}
        for name, array in zip(names, inputs, strict=True):
            place = None if bundle is None else bundle.place(array)
            if place is not None:
                made[f"PLACE_{name}"] = place
        return made

    def declarations(self, inputs: Sequence[str]) -> str:
        """What precedes a body: the names that are no arguments."""
        lines = list[str]()
        for name, at in zip(inputs, self.pattern, strict=True):
            if at == _BUNDLED:
                kind = f"const GLOBAL TYPE_{name}*"
                found = f"reinterpret_cast<{kind}>(bundle + PLACE_{name})"
                lines.append(f"{kind} const {name} = {found};")
            elif at != _PASSED:
                lines.append(f"auto const {name} = {inputs[at]};")
        return "".join(f"{line}\n" for line in lines)


def facts_of(name: str) -> list[str]:
    """Names that MLX defines beside an input, where a body uses them."""
    return [f"{name}_{fact}" for fact in ("shape", "strides", "ndim")]

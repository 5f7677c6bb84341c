"""A plan of memory, as a value that shows its arithmetic."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of a model's memory.

    Attributes:
        source: folder, file or Hub id.
        model_type: its family.
        num_tensors: tensors in the files.
        file_bytes: bytes of the tensors in the files.
        weight_bytes: bytes of the weights once loaded; exact.
        active_bytes: those of them that one token needs: of routed experts, the few it is sent to.
        left_bytes: bytes of tables that stay in the files, of which a token reads a few rows.
        drafter_bytes: bytes of a drafter's weights once loaded; exact.
        drafter_session_bytes: bytes of its caches in one session of `context` tokens; exact.
        context: tokens of a session.
        sessions: sessions kept.
        session_bytes: bytes of one session's caches at `context` tokens; exact.
        state_bytes: those of them that recurrent layers take at any length; exact.
        checkpoint_bytes: what a session keeps at most of earlier states of these, to go back to.
        working_bytes: activations of the largest prefill chunk and the logits; an estimate.
        free_bytes: memory that may be had now, or None where the machine does not say.
    """

    source: str
    model_type: str
    num_tensors: int
    file_bytes: int
    weight_bytes: int
    context: int
    sessions: int
    session_bytes: int
    working_bytes: int
    free_bytes: int | None
    state_bytes: int = 0
    active_bytes: int = 0
    left_bytes: int = 0
    drafter_bytes: int = 0
    drafter_session_bytes: int = 0
    checkpoint_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of all sessions' caches, the drafter's and states to go back to among them."""
        return self.sessions * self._session_bytes

    @property
    def _session_bytes(self) -> int:
        return self.session_bytes + self.drafter_session_bytes + self.checkpoint_bytes

    @property
    def total_bytes(self) -> int:
        """Weights, the drafter's too, caches and working memory."""
        weights = self.weight_bytes + self.drafter_bytes
        return weights + self.cache_bytes + self.working_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits the free memory; None where that is unknown."""
        return None if self.free_bytes is None else self.total_bytes <= self.free_bytes

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.free_bytes is None:
            return f"needs {megabytes(self.total_bytes)}; this machine does not say what is free"
        if self.fits:
            return (
                f"fits: {megabytes(self.free_bytes - self.total_bytes)} of "
                f"{megabytes(self.free_bytes)} free memory stay free"
            )
        short = self.total_bytes - self.free_bytes
        return f"does not fit: {megabytes(short)} are lacking; {self._way_out(short)}"

    def _way_out(self, short: int) -> str:
        kept = self.sessions * self.checkpoint_bytes
        if short <= kept:
            return f"checkpoint_bytes={(kept - short) // self.sessions} would fit"
        grows = self.cache_bytes - kept - self.sessions * self.state_bytes
        room = grows - (short - kept)
        if room <= 0:
            return "a smaller quantization or more memory is needed"
        given = "with checkpoint_bytes=0 " if kept else ""
        return f"{given}about {int(self.context * room / grows)} tokens a session would fit"

    def as_dict(self) -> dict[str, Any]:
        """Every number by its name."""
        names = self.__slots__
        fields = {name: getattr(self, name) for name in names}
        extra = ("cache_bytes", "total_bytes", "fits", "verdict")
        return fields | {name: getattr(self, name) for name in extra}

    def __repr__(self) -> str:
        rows = [
            ("weights", self.weight_bytes, f"{self.num_tensors} tensors, "
             f"{megabytes(self.file_bytes)} on disk" + self._left_note() + self._active_note()),
            *([("drafter", self.drafter_bytes, "its weights")] if self.drafter_bytes else []),
            ("caches", self.cache_bytes,
             f"{self.sessions} x {megabytes(self._session_bytes)}, a session of {self.context} "
             "tokens" + self._state_note()),
            ("working", self.working_bytes, "one prefill chunk and the logits, estimated"),
            ("total", self.total_bytes, self.verdict),
        ]  # fmt: skip
        lines = [f"{name:<8} {megabytes(size):>12}   {note}" for name, size, note in rows]
        return "\n".join([f"{self.source} ({self.model_type})", *lines])

    def _left_note(self) -> str:
        if not self.left_bytes:
            return ""
        return f", where {megabytes(self.left_bytes)} stay and are read row by row"

    def _active_note(self) -> str:
        if self.active_bytes in (0, self.weight_bytes):
            return ""
        return f", {megabytes(self.active_bytes)} of them for one token"

    def _state_note(self) -> str:
        parts = (
            (self.state_bytes, "", "recurrent state"),
            (self.checkpoint_bytes, "up to ", "earlier states to go back to (checkpoint_bytes)"),
            (self.drafter_session_bytes, "", "the drafter's"),
        )
        shown = [f", {most}{megabytes(size)} of it {name}" for size, most, name in parts if size]
        return "".join(shown)


def megabytes(count: int) -> str:
    """A number of bytes for people: decimal megabytes, kilobytes of few, gigabytes of many."""
    if 0 < count < 10**5:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 10**10 else f"{count / 1e6:.1f} MB"

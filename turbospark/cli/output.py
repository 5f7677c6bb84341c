"""Where output goes: text to stdout, everything else to stderr, bars to terminals only."""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

_WIDTH = 30
_INTERVAL = 0.05


class Console:
    """The terminal as the commands see it.

    Args:
        quiet: say nothing on stderr but errors.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._bars = sys.stderr.isatty() and not quiet

    def note(self, text: str) -> None:
        """A line for the reader, not part of the result."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def show(self, text: str, end: str = "\n") -> None:
        """A part of the result."""
        try:
            sys.stdout.write(text + end)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error

    def bar(self, label: str) -> Callable[[int, int], None] | None:
        """A progress callback that draws a bar, or None where nobody would see it."""
        return _Bar(label) if self._bars else None


class Notices(logging.Handler):
    """The library's notices, a line each, on whatever stderr is now."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, label: str) -> None:
        self._label = label
        self._next = time.monotonic() + 4 * _INTERVAL  # what is done at once draws nothing
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total:
            if self._drawn:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._drawn = False
        elif now >= self._next:
            filled = _WIDTH * done // max(total, 1)
            bar = "#" * filled + "-" * (_WIDTH - filled)
            sys.stderr.write(f"\r\x1b[K{self._label} [{bar}] {100 * done // max(total, 1)}%")
            sys.stderr.flush()
            self._next, self._drawn = now + _INTERVAL, True


def supply_missing_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr empty ones.

    Their descriptors would otherwise go to the next files that are opened.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  # to the end
            setattr(sys, name, stream)


def tolerate_any_text() -> None:
    """Never fail on a character that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def drop_stdout() -> None:
    """After the reader of a pipe has gone: let the interpreter's last flush go nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = None  # no file behind it

"""Bars are for terminals alone."""

import sys

import pytest

from turbospark.cli import output
from turbospark.cli.output import Console


def test_nobody_sees_a_bar_without_a_terminal() -> None:
    assert Console(quiet=False).bar("loading") is None


def test_a_bar_is_drawn_and_wiped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(output, "_INTERVAL", 0.0)
    assert Console(quiet=True).bar("loading") is None
    bar = Console(quiet=False).bar("loading")
    assert bar is not None
    bar(1, 4)
    assert "loading [#######" in (drawn := capsys.readouterr().err)
    assert drawn.endswith("] 25%")
    bar(4, 4)
    assert capsys.readouterr().err == "\r\x1b[K"


def test_what_is_done_at_once_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = Console(quiet=False).bar("loading")
    assert bar is not None
    bar(1, 4)
    bar(4, 4)
    assert capsys.readouterr().err == ""

"""Processes that fork: MLX's threads stay behind, so a child must not wait for them."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

_FORK = """
import os, signal, sys
import turbospark as ts
from turbospark.testing import scripted_engine

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            work()
        except ts.KernelError as error:
            print(error, flush=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _FORK + script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_fork_after_a_text_is_refused_at_once_and_the_parent_goes_on() -> None:
    lines = run(
        """
engine = scripted_engine()
chat = engine.session()
first = engine.generate("hi", max_tokens=3)
in_child(lambda: engine.generate("hi", max_tokens=3))
in_child(lambda: chat.send("hi", max_tokens=3))
in_child(lambda: ts.load("nowhere"))
assert engine.generate("hi", max_tokens=3) == first
"""
    )
    assert len(lines) == 3
    assert all("was forked from" in line and "'spawn'" in line for line in lines)


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal may not be used after a fork")
def test_a_fork_before_the_first_load_computes() -> None:
    lines = run(
        """
in_child(lambda: print(scripted_engine().generate("hi", max_tokens=3).generation_tokens))
"""
    )
    assert lines == ["3"]

"""The host kernels compile for 64-bit Arm, which no test machine here has."""

import shutil
import subprocess
from pathlib import Path

import pytest

from turbospark.kernels.host.build import FLAGS, NATIVE
from turbospark.kernels.host.cpu import isa_flags

CLANG = next(filter(None, map(shutil.which, ["clang++", "clang", "clang++-19", "clang-19"])), None)
SOURCES = sorted(file.name for file in NATIVE.glob("*.cpp"))
WIDTHS = {"matmul_quantized.cpp": ["-DTS_BITS=5", "-DTS_GROUP=32"]}


def system_headers(folder: Path) -> list[str]:
    """The C++ library's headers of this machine; its own word size stands in for Arm's."""
    listed = subprocess.run(
        [CLANG, "-E", "-x", "c++", "-", "-v"], input="", capture_output=True, text=True, check=True
    ).stderr
    searched = listed.partition("search starts here:\n#include <...>")[2].splitlines()[1:]
    paths = [line.strip() for line in searched if line.startswith(" /")]
    paths = [path for path in paths if "/clang/" not in path]
    (folder / "gnu").mkdir()
    (folder / "gnu" / "stubs-32.h").touch()
    return [f"-isystem{path}" for path in [str(folder), *paths]]


@pytest.mark.skipif(CLANG is None, reason="needs clang, which compiles for any CPU")
@pytest.mark.parametrize("mode", [0, 1])
def test_every_source_compiles_for_arm64(mode, tmp_path):
    headers = system_headers(tmp_path)
    for source in SOURCES:
        if mode == 1 and source not in WIDTHS:
            continue
        command = [
            CLANG,
            "--target=aarch64-linux-gnu",
            *FLAGS,
            *isa_flags("neon"),
            "-Wall",
            "-Wextra",
        ]
        command += ["-Werror", "-Wno-unused-command-line-argument", f"-DTS_MODE={mode}"]
        command += [
            *WIDTHS.get(source, []),
            *headers,
            "-S",
            "-o",
            "/dev/null",
            str(NATIVE / source),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]

"""Compiling and caching: on sources of one line, so that nothing here takes long."""

import logging
import os
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from turbospark.errors import KernelError
from turbospark.kernels.host import build, cpu
from turbospark.kernels.host.build import Unit, find_compiler, load_library
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.select import choose_kernels
from turbospark.settings import KernelPolicy

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }'
UNITS = [Unit("probe.cpp", ("ANSWER=42",))]


@pytest.fixture(autouse=True)
def native(tmp_path, monkeypatch):
    """One-line sources and an empty cache folder."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "probe.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "NATIVE", folder)
    monkeypatch.setenv("TURBOSPARK_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def counting(tmp_path):
    """A compiler that notes every call."""
    real = find_compiler(KernelPolicy()).command[-1]
    calls = tmp_path / "calls"
    compiler = script(tmp_path / "counting-c++", f'echo call >> {calls}\nexec {real} "$@"')
    return find_compiler(KernelPolicy(cxx=str(compiler))), calls


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def answer(compiler, units=UNITS):
    return load_library("probe", units, "generic", compiler).answer()


def cached(tmp_path):
    return sorted((tmp_path / "cache" / "kernels").glob("*.so"))


def test_a_second_load_does_not_compile(counting):
    compiler, calls = counting
    assert answer(compiler) == 42
    before = calls.read_text()
    assert answer(compiler) == 42
    assert calls.read_text() == before


def test_another_definition_source_or_header_is_another_library(counting, native, tmp_path):
    compiler, _ = counting
    assert answer(compiler) == 42
    assert answer(compiler, [Unit("probe.cpp", ("ANSWER=7",))]) == 7
    (native / "probe.cpp").write_text(SOURCE.replace("ANSWER;", "ANSWER + 1;"))
    assert answer(compiler) == 43
    (native / "new.h").write_text("")
    assert answer(compiler) == 43
    assert len(cached(tmp_path)) == 4


def test_another_cpu_does_not_load_this_ones_library(counting, monkeypatch, tmp_path):
    compiler, _ = counting
    answer(compiler)
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"x86_64", "other"}))
    assert answer(compiler) == 42
    assert len(cached(tmp_path)) == 2


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"garbage" * 1000])
def test_a_damaged_library_is_compiled_again_and_said_so(counting, tmp_path, caplog, damage):
    compiler, _ = counting
    answer(compiler)
    (file,) = cached(tmp_path)
    # A new file: the old one is mapped into this process.
    file.unlink()
    file.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "turbospark"):
        assert answer(compiler) == 42
    assert str(file) in caplog.text
    assert len(caplog.records) == 1


def test_a_cache_folder_that_cannot_be_used_is_replaced_and_said_so(
    counting, tmp_path, monkeypatch, caplog
):
    compiler, _ = counting
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TURBOSPARK_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "turbospark"):
        assert answer(compiler) == 42
        assert answer(compiler) == 42
    assert len(caplog.records) == 1
    assert "this process only" in caplog.text


def test_processes_that_compile_at_once_agree(counting, tmp_path, native):
    code = textwrap.dedent(f"""
        from pathlib import Path
        from turbospark.kernels.host import build
        from turbospark.settings import KernelPolicy
        build.NATIVE = Path({str(native)!r})
        compiler = build.find_compiler(KernelPolicy())
        units = [build.Unit("probe.cpp", ("ANSWER=42",))]
        print(build.load_library("probe", units, "generic", compiler).answer())
    """)

    def one(_):
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == ["42\n"] * 3
    left = {file.suffix for file in (tmp_path / "cache" / "kernels").iterdir()}
    assert left == {".so"}


def test_a_failing_compiler_is_quoted(tmp_path):
    bad = script(tmp_path / "bad-c++", "echo 'probe.cpp:1: error: the moon is full' >&2; exit 3")
    compiler = find_compiler(KernelPolicy(cxx=str(bad)))
    with pytest.raises(KernelError, match=r"bad-c.*status 3.*the moon is full"):
        answer(compiler)


def test_a_source_that_does_not_compile_is_quoted(counting, native):
    (native / "probe.cpp").write_text("int answer( { }")
    with pytest.raises(KernelError, match="error"):
        answer(counting[0])


def test_a_compiler_may_carry_arguments():
    real = find_compiler(KernelPolicy()).command[-1]
    compiler = find_compiler(KernelPolicy(cxx=f"env LANG=C {real}"))
    assert answer(compiler) == 42


def test_a_compiler_may_carry_flags_behind_it():
    real = find_compiler(KernelPolicy()).command[-1]
    compiler = find_compiler(KernelPolicy(cxx=f"{real} -O1"))
    assert compiler.command == (real, "-O1")
    assert answer(compiler) == 42


def test_a_compiler_behind_a_wrapper_is_part_of_the_identity():
    real = find_compiler(KernelPolicy())
    assert real.identity in find_compiler(KernelPolicy(cxx=f"env {real.command[-1]}")).identity


def test_an_unbalanced_quote_is_no_command():
    with pytest.raises(KernelError, match="no command"):
        find_compiler(KernelPolicy(cxx='g++ "'))


def test_compiling_is_announced(counting, caplog):
    build._announce.cache_clear()
    with caplog.at_level(logging.INFO, "turbospark"):
        answer(counting[0])
        answer(counting[0])
    assert [record.getMessage() for record in caplog.records] == [
        "turbospark: compiling the kernels for this CPU; later starts find them compiled"
    ]


def test_cxx_names_the_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelError, match="no-such-compiler"):
        find_compiler(KernelPolicy())


def test_without_a_compiler_the_reference_runs_and_says_so(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, "turbospark"):
        assert isinstance(choose_kernels(KernelPolicy()), ReferenceKernels)
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "policy",
    [
        KernelPolicy(kernels="host"),
        KernelPolicy(activations="int8"),
        KernelPolicy(isa="generic"),
        KernelPolicy(cxx="c++"),
    ],
)
def test_an_explicit_request_without_a_compiler_is_refused(monkeypatch, policy):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelError, match=r"C\+\+ compiler"):
        choose_kernels(policy)


def test_a_failing_compiler_leaves_the_reference_unless_host_was_asked_for(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", str(script(tmp_path / "bad-c++", "echo full moon >&2; exit 1")))
    with caplog.at_level(logging.WARNING, "turbospark"):
        assert choose_kernels(KernelPolicy()).name == "reference"
    assert "full moon" in caplog.text
    with pytest.raises(KernelError, match="full moon"):
        choose_kernels(KernelPolicy(kernels="host"))


def test_instruction_sets_are_told_from_cpu_features(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"avx2", "fma", "f16c", "bmi2"}))
    assert cpu.available_isas() == ["avx2", "generic"]
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"arm64", "asimd"}))
    assert cpu.available_isas() == ["neon", "generic"]
    assert cpu.choose_isa("auto") == "neon"
    assert os.cpu_count() >= cpu.core_count() >= 1

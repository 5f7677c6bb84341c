import pytest

import metal_emu


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_emu, "why_unavailable", lambda: "clang-19 is missing")


@pytest.mark.usefixtures("_no_compiler")
def test_a_missing_compiler_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metal_emu.REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="clang-19 is missing"):
        metal_emu.require_emulator()


@pytest.mark.usefixtures("_no_compiler")
def test_a_missing_compiler_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(metal_emu.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="REQUIRE_EMULATOR=1, but clang-19 is missing"):
        metal_emu.require_emulator()

"""What `import turbospark` gives, costs and leaves alone."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import turbospark

PUBLIC = {
    "BackendError", "CheckpointError", "ConfigError", "ContextLengthError", "Conversation",
    "Engine", "GeneratedText", "GenerationResponse", "KernelError", "KernelPolicy",
    "NonFiniteError", "OptionError", "ProducerError", "PromptError", "RewindError",
    "RunnerConfig", "ShapeError", "SourceError", "TemplateError", "TokenizerError",
    "TurbosparkError", "UnsupportedError", "__version__", "generate", "inspect", "kernels", "load",
    "make_prompt_cache", "plan", "stream_generate",
}  # fmt: skip


def python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=False
    )


def test_public_names_are_pinned_and_exist() -> None:
    assert set(turbospark.__all__) == PUBLIC
    assert sorted(turbospark.__all__) == turbospark.__all__
    for name in PUBLIC:
        assert getattr(turbospark, name) is not None
    assert set(dir(turbospark)) == PUBLIC


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = turbospark.nonsense  # type: ignore[attr-defined]


def test_import_is_fast_and_light() -> None:
    code = (
        "import time; began = time.perf_counter(); import turbospark\n"
        "print(time.perf_counter() - began)\n"
        "import sys\n"
        "heavy = {'transformers', 'torch', 'families', 'tokenizers', 'sentencepiece', 'numpy',"
        " 'huggingface_hub', 'jinja2', 'mlx_lm', 'turbospark.api'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    runs = [python(code) for _ in range(3)]
    seconds = min(float(run.stdout.split("\n")[0]) for run in runs)
    assert runs[0].stdout.split("\n")[1] == "[]"
    assert seconds < 0.25


def test_loading_nothing_heavy_for_the_api() -> None:
    code = (
        "import sys, turbospark; turbospark.load\n"
        "heavy = {'transformers', 'torch', 'families', 'huggingface_hub', 'jinja2'}\n"
        "print(sorted(name for name in heavy if name in sys.modules))"
    )
    assert python(code).stdout.strip() == "[]"


def test_without_a_back_end_the_error_names_the_extras(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: not found')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n    import turbospark\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    shown = python(code).stdout
    assert shown.startswith("BackendError MLX has no back end on this machine (libmlx.so")
    assert "turbospark[cpu]" in shown
    assert "turbospark[cuda13]" in shown


def test_the_command_line_answers_quickly() -> None:
    began = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "turbospark.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "generate" in run.stdout
    assert time.perf_counter() - began < 5

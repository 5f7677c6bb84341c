"""The command line: results on stdout, everything else on stderr, errors in one line."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import turbospark as ts
from turbospark.cli.main import main
from turbospark.testing import write_tiny_checkpoint

JSON_FIELDS = {
    "text", "token_ids", "prompt_tokens", "prompt_tps", "generation_tps", "ttft", "reused_tokens",
    "reuse_reason", "evicted", "peak_memory", "finish_reason", "kernels", "drafted", "accepted",
    "accepted_per_position", "rounds", "rollbacks", "draft_off_reason",
}  # fmt: skip
COMMANDS = ("generate", "chat", "bench", "plan", "convert", "inspect", "synthetic")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        shown = self._capsys.readouterr()
        return code, shown.out, shown.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TURBOSPARK_KERNELS", "reference")
    return Run(capsys)


def test_text_goes_to_stdout_and_the_rest_to_stderr(run: Run, tiny: str) -> None:
    code, out, err = run("generate", "hi", "--model", tiny, "--max-tokens", "5")
    as_json = json.loads(run("generate", "hi", "--model", tiny, "--max-tokens", "5", "--json")[1])
    assert code == 0
    assert out == as_json["text"] + "\n"
    assert "tok/s" in err
    assert "\r" not in err


def test_quiet_leaves_stderr_empty(run: Run, tiny: str) -> None:
    code, out, err = run("generate", "hi", "-m", tiny, "--max-tokens", "5", "--quiet")
    assert (code, err) == (0, "")
    assert out


def test_json_is_one_object_with_every_field(run: Run, tiny: str) -> None:
    _, out, _ = run(
        "generate", "hi", "--model", tiny, "--json", "--max-tokens", "7", "--temperature", "0.9",
        "--seed", "3", "--stop", "zzz", "--stop", "qqq",
    )  # fmt: skip
    shown = json.loads(out)
    assert set(shown) == JSON_FIELDS
    assert len(shown["token_ids"]) == 7
    assert shown["prompt_tokens"] == 2
    assert shown["finish_reason"] == "length"
    assert "reference" in shown["kernels"]


def test_a_seed_repeats_a_text(run: Run, tiny: str) -> None:
    def text(seed: str) -> str:
        return run(
            "generate", "hi", "-m", tiny, "--temp", "1", "--seed", seed, "--max-tokens", "12"
        )[1]

    assert text("3") == text("3") != text("4")


def test_stdin_and_the_chat_template_are_prompts(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    piped = run("generate", "-", "-m", tiny, "--max-tokens", "5")[1]
    assert piped == run("generate", "hi", "-m", tiny, "--max-tokens", "5")[1]
    code, _, err = run("generate", "hi", "-m", tiny, "--chat")
    assert code == 1
    assert "chat template" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_has_an_example_that_parses(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    example = re.search(rf"example: turbospark ({command} .*)", out.replace("\n", " "))
    assert example is not None
    assert run(*shlex.split(example[1]), "--show-config")[0] == 0


def test_flags_follow_the_option_tables(run: Run) -> None:
    from turbospark.cli.flags import flag
    from turbospark.settings import GenerationConfig, KernelPolicy, LoadConfig, RunnerConfig

    out = run("generate", "--help")[1]
    for table in (GenerationConfig, RunnerConfig, KernelPolicy, LoadConfig):
        for name in table.__dataclass_fields__:
            assert flag(name) in out
    assert "--temp" in out
    assert "--prefill-step-size" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "COMMAND"),
        (("nonsense",), 2, "invalid choice"),
        (("generate", "--temprature", "1"), 2, "did you mean '--temperature'"),
        (("generate", "x", "--ctx-size=9"), 2, "did you mean '--max-context'"),
        (("generate", "x", "--draft-model", "y"), 2, "did you mean '--draft'"),
        (("generate", "Once", "upon"), 2, "unexpected argument 'upon'"),
        (("generate", "x", "--max-tokens", "0"), 2, "max_tokens=0"),
        (("generate", "x", "--temperature", "-1"), 2, "temperature=-1.0"),
        (("generate", "x", "--temperature", "hot"), 2, "temperature='hot' is not a number"),
        (("generate", "x", "--kernels", "gpu"), 2, "invalid choice: 'gpu'"),
        (("generate", "x", "--kv-bits", "8"), 2, "kv_bits='8': a quantized KV cache is not built"),
        (("generate", "x", "--draft-block", "0"), 2, "draft_block='0'"),
        (("generate", "x", "--session-slots", "0"), 2, "session_slots='0'"),
        (("chat", "--system", "be kind", "--resume", "a"), 2, "give one"),
        (("chat", "-m", "./nowhere", "--resume", "nope"), 1, "no session can be read from nope"),
        (("generate", "x", "--image", "a.png"), 2, "image='a.png': image input is not built"),
        (("generate", "x", "--expert-residency", "mapped"), 2, "residency='mapped'"),
        (("generate", "", "-m", "./nowhere"), 1, "the prompt is empty"),
        (("generate", "x", "-m", "./nowhere/at/all"), 1, "no such file or folder"),
        (("plan", "./nowhere", "--context", "0"), 2, "context=0"),
        (("inspect", "./nowhere"), 1, "no such file or folder"),
        (("inspect", "./nowhere", "--quantize", "int4"), 2, "quantize: `inspect` does not use it"),
        (("convert", "./nowhere"), 2, "--output"),
        (("synthetic", "./new", "--kind", "dens"), 2, "kind='dens' is not one of dense, sliding"),
        (("synthetic", "./new", "--set", "layers"), 2, "'layers' is not NAME=VALUE"),
        (("synthetic", "./new", "--set", "hiden_size=3"), 2, "did you mean 'hidden_size'"),
        (("synthetic", "./new", "--set", "kind=moe"), 2, "no value of config.json: give --kind"),
        (("bench", "--prompt-tokens", "0"), 2, "--prompt-tokens='0'"),
        (("bench", "--repetitions", "0"), 2, "--repetitions"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, out, err = run(*arguments)
    assert found == code
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("turbospark")


def test_a_fault_of_ours_is_one_line_too(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turbospark.cli.engine.load", lambda *_, **__: 1 / 0)
    code, _, err = run("generate", "x", "-m", tiny)
    assert code == 1
    assert err == (
        "turbospark: error: ZeroDivisionError (--traceback shows where): division by zero\n"
    )
    with pytest.raises(ZeroDivisionError):
        run("generate", "x", "-m", tiny, "--traceback")


def test_show_config_names_every_option_its_value_and_origin(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURBOSPARK_THREADS", "3")
    out = run("generate", "--show-config", "--seed", "4")[1]
    assert re.search(r"^seed +4 +\(--seed\)$", out, re.MULTILINE)
    assert re.search(r"^threads +3 +\(TURBOSPARK_THREADS\)$", out, re.MULTILINE)
    assert re.search(r"^temperature +0.0 +\(default\)$", out, re.MULTILINE)
    shown = json.loads(run("generate", "--show-config", "--json")[1])
    assert shown["kernels"] == {"value": "reference", "origin": "TURBOSPARK_KERNELS"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("synthetic", "a", "--kind", "moe"), {"kind": ("moe", "--kind"), "seed": (0, "default")}),
        (
            ("plan", "a", "--context", "7"),
            {"context": (7, "--context"), "sessions": (2, "default")},
        ),
        (("inspect", "a", "--revision", "b"), {"revision": ("b", "--revision")}),
        (("chat", "--system", "be kind"), {"system": ("be kind", "--system")}),
    ],
)
def test_show_config_names_what_only_one_command_has(
    run: Run, arguments: tuple[str, ...], shown: dict[str, tuple[object, str]]
) -> None:
    found = json.loads(run(*arguments, "--show-config", "--json")[1])
    for name, (value, origin) in shown.items():
        assert found[name] == {"value": value, "origin": origin}
    assert not {"json", "show_config", "traceback", "kv_bits"} & set(found)


def test_an_error_of_the_system_names_the_file_and_no_number(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, err = run("synthetic", str(tmp_path / "file" / "sub"))
    assert (code, err) == (1, f"turbospark: error: {tmp_path}/file/sub: Not a directory\n")


def test_help_and_configuration_leave_out_what_a_command_refuses(run: Run) -> None:
    assert "--quantize" not in run("inspect", "--help")[1]
    assert "quantize" not in json.loads(run("inspect", "a", "--show-config", "--json")[1])
    assert "--local-files-only" in run("plan", "--help")[1]
    code, _, err = run("plan", "a/b", "--local-files-only")
    assert code == 1
    assert "a/b was not downloaded before" in err


def test_chat_is_one_session_with_commands(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "hi\nyou\n/what\n/save\n/save  \n/reset\nhi\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = run("chat", "-m", tiny, "--max-tokens", "3", "--json")
    replies = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert err.count("/save needs the name of a file: /save FILE") == 2
    assert len(replies) == 3
    assert replies[0]["reused_tokens"] == 0 < replies[1]["reused_tokens"]
    assert replies[2]["token_ids"] == replies[0]["token_ids"]
    assert replies[2]["reused_tokens"] == 0
    assert "/what is no command" in err


def test_chat_goes_on_after_a_refused_message(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600 + "\nhi\n"))
    code, out, err = run("chat", "-m", tiny, "--max-tokens", "3", "--json")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "exceed max_context=512" in err


def test_chat_saves_and_resumes(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(said: str, *more: str) -> tuple[list[Any], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        code, out, err = run("chat", "-m", tiny, "--max-tokens", "3", "--json", *more)
        assert code == 0
        return [json.loads(line) for line in out.splitlines()], err

    file = tmp_path / "a.tsession"
    first, err = chat(f"hi\n/save {file}\nyou\n/save {tmp_path}/no/where\n")
    assert f"saved as {file}" in err
    assert "cannot be saved as" in err
    again, _ = chat("you\n", "--resume", str(file))
    assert again[0]["token_ids"] == first[1]["token_ids"]
    assert again[0]["reused_tokens"] == first[1]["reused_tokens"] > 0
    file.write_bytes(file.read_bytes()[:-3])
    code, _, err = run("chat", "-m", tiny, "--resume", str(file))
    assert code == 1
    assert "a.tsession is damaged" in err


def test_drafting_is_shown_where_it_runs_and_explained_where_not(run: Run, tiny: str) -> None:
    def generate(*more: str) -> Any:
        found = run("generate", "abcabcabcabc", "-m", tiny, "--max-tokens", "30", "--json", *more)
        return json.loads(found[1])

    plain = generate()
    assert (plain["drafted"], plain["rounds"], plain["accepted_per_position"]) == (0, 0, [])
    assert "no model of the family llama drafts" in plain["draft_off_reason"]
    drafted = generate("--draft", "ngram", "--draft-block", "3")
    assert drafted["token_ids"] == plain["token_ids"]
    assert 0 < drafted["rounds"] <= drafted["drafted"] <= 3 * drafted["rounds"]
    assert sum(drafted["accepted_per_position"]) == drafted["accepted"]
    assert drafted["draft_off_reason"] is None
    by_itself = generate("--draft", tiny)
    assert by_itself["token_ids"] == plain["token_ids"]
    assert by_itself["accepted"] == by_itself["drafted"] > 0
    assert run("generate", "x", "-m", tiny, "--draft", "mtp")[0] == 2
    assert "no such file" in run("generate", "x", "-m", tiny, "--draft", "./nowhere/at")[2]


def test_the_byte_budget_of_idle_conversations_is_shown(run: Run) -> None:
    shown = json.loads(run("generate", "--show-config", "--json")[1])["session_bytes"]
    assert 0 < shown["value"] <= 2 << 30
    out = run("generate", "--show-config", "--session-bytes", "12345")[1]
    assert re.search(r"^session_bytes +12345 +\(--session-bytes\)$", out, re.MULTILINE)


def test_a_system_message_needs_a_template(run: Run, tiny: str) -> None:
    code, _, err = run("chat", "-m", tiny, "--system", "be kind")
    assert code == 2
    assert "no chat template" in err


def test_bench_measures_and_names_what_ran(run: Run, tiny: str) -> None:
    sizes = ("--prompt-tokens", "5,9", "--gen-tokens", "3", "--repetitions", "2")
    shown = json.loads(run("bench", "-m", tiny, *sizes, "--json")[1])
    assert [test["test"] for test in shown["tests"]] == ["pp5", "pp9", "tg3"]
    assert all(test["tokens_per_second"] > 0 for test in shown["tests"])
    assert 0 < shown["tests"][2]["percent_of_bandwidth"] < 1000
    assert shown["bandwidth_bytes_per_second"] > 1e8
    assert set(shown["versions"]) == {"turbospark", "mlx", "python"}
    assert shown["prefix_reuse"] is False
    assert shown["drafter"] == "off"
    drafted = json.loads(run("bench", "-m", tiny, *sizes, "--draft", "ngram", "--json")[1])
    assert [test["test"] for test in drafted["tests"]] == ["pp5", "pp9", "tg3", "dg3"]
    assert "accepted_per_position" in drafted["tests"][3]
    assert (drafted["tests"][3]["reused_tokens"], drafted["tests"][3]["evicted"]) == (0, False)
    table = run("bench", "-m", tiny, *sizes)[1]
    assert "| tg3 " in table
    assert "reference" in table


def test_bench_refuses_what_does_not_fit(run: Run, tiny: str) -> None:
    code, _, err = run("bench", "-m", tiny, "--prompt-tokens", "600")
    assert code == 2
    assert "600 tokens exceed max_context=512" in err


def test_a_synthetic_checkpoint_is_written_and_runs(run: Run, tmp_path: Path) -> None:
    target = str(tmp_path / "a")
    code, out, _ = run("synthetic", target, "--kind", "moe", "--set", "num_hidden_layers=3")
    assert code == 0
    assert "2 x window 16 attention" in out
    assert run("generate", "hi", "-m", target, "--max-tokens", "3")[0] == 0
    float_one = str(tmp_path / "b")
    given = ("--model-type", "llama", "--quantize", "none", "--seed", "7", "--json")
    found = json.loads(run("synthetic", float_one, *given)[1])
    assert set(found["quantization"]) == {"BF16"}
    assert run("synthetic", float_one)[0] == 2


def test_plan_inspect_and_convert_run(run: Run, tiny: str, tmp_path: Path) -> None:
    planned = json.loads(run("plan", tiny, "--context", "100", "--json")[1])
    assert planned["context"] == 100
    assert planned["weight_bytes"] > 0
    plain, by_name = json.loads(run("plan", tiny, "--json")[1]), ts.plan(tiny)
    assert (plain["context"], plain["sessions"]) == (by_name.context, by_name.sessions) == (8192, 2)
    assert plain["total_bytes"] == by_name.total_bytes
    assert "fit" in run("plan", tiny)[1]
    assert json.loads(run("inspect", tiny, "--json")[1])["model_type"] == "llama"
    target = tmp_path / "out"
    assert run("convert", tiny, "--output", str(target), "--quantize", "int8-g32")[0] == 0
    assert run("generate", "hi", "-m", str(target), "--max-tokens", "2")[0] == 0
    code, _, err = run("convert", tiny, "--output", str(target))
    assert code == 2
    assert "there already" in err


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "turbospark.cli", *arguments]


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [(">&-", 0, "ended by length"), ("2>&-", 0, ""), (">&- 2>&-", 0, "")],
)
def test_closed_streams_are_no_fault(tiny: str, closed: str, code: int, said: str) -> None:
    words = command("generate", "hi", "-m", tiny, "--max-tokens", "3", "--kernels", "reference")
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(words)} {closed}"], capture_output=True, timeout=60
    )
    assert done.returncode == code
    assert said in done.stderr.decode()


def test_a_closed_stdin_is_empty_and_gives_its_descriptor_to_no_file(tiny: str) -> None:
    words = shlex.join(command("chat", "-m", tiny, "--kernels", "reference"))
    done = subprocess.run(["sh", "-c", f"{words} <&-"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = shlex.join(command("generate", "-", "-m", tiny))
    done = subprocess.run(["sh", "-c", f"{words} <&-"], capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"the prompt is empty" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("arguments", [("inspect",), ("generate", "hi", "--max-tokens", "2", "-m")])
def test_a_full_disk_behind_stdout_is_one_sentence(tiny: str, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*arguments, tiny, "-q"), stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    said = b"turbospark: error: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_closed_pipe_is_quiet(tiny: str) -> None:
    process = subprocess.Popen(
        command(
            "generate", "hi", "-m", tiny, "--max-tokens", "400", "--kernels", "reference", "-q"
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_ctrl_c_ends_without_a_traceback(tiny: str) -> None:
    process = subprocess.Popen(
        command("generate", "hi", "-m", tiny, "--max-tokens", "500", "--kernels", "reference"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert b"Traceback" not in err + out
    assert process.returncode == 130

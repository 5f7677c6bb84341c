"""Plans: exact weight and cache bytes from headers, and an honest verdict."""

import json
import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from loading.drafter_files import write_blocks, write_qwen
from loading.files import (
    LLAMA,
    gguf_tensors,
    llama_weights,
    q8_0,
    two_shards,
    write_folder,
    write_gguf,
)
from loading.hub_files import serve_hub

import turbospark
from turbospark.errors import CheckpointError, OptionError, SourceError
from turbospark.loading import plan as plans
from turbospark.loading.build import load_model
from turbospark.loading.drafters import load_drafter
from turbospark.loading.install import parameter_slots, parts_of
from turbospark.loading.plan import plan, session_bytes
from turbospark.loading.planned import Plan
from turbospark.nn.linear import Matrix
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy, RunnerConfig
from turbospark.testing import write_tiny_checkpoint


def loaded_bytes(path, **options):
    loaded = load_model(path, policy=KernelPolicy(kernels="reference"), **options)
    total = 0
    for slot in parameter_slots(loaded.model).values():
        value = slot.module.value if isinstance(slot.module, Matrix) else slot.module.weight
        total += sum(part.nbytes for part in parts_of(value))
    return total


@pytest.mark.parametrize("quantize", [None, "int4-g32", "int8"])
def test_weight_bytes_of_a_folder_are_exact(tmp_path, quantize):
    folder = write_folder(tmp_path / "a", shards=two_shards(llama_weights()))
    found = plan(folder, 50, quantize=quantize)
    assert found.weight_bytes == loaded_bytes(folder, quantize=quantize)
    assert found.file_bytes == sum(array.nbytes for array in llama_weights().values())
    assert found.num_tensors == len(llama_weights())
    assert found.model_type == "llama"


def test_weight_bytes_of_a_gguf_file_are_exact(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=q8_0))
    assert plan(path, 50).weight_bytes == loaded_bytes(path)


def test_planning_reads_no_weights(tmp_path):
    big = llama_weights() | {"extra": np.zeros(1, np.float32)}
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    path = write_folder(tmp_path / "a")
    plan(path, 10_000)
    assert mx.get_peak_memory() - before < 100_000
    with pytest.raises(CheckpointError, match="left over"):
        plan(write_folder(tmp_path / "b", big))


@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"model_type": "mistral", "sliding_window": 29}])
@pytest.mark.parametrize("context", [7, 128, 300])
def test_cache_bytes_are_what_a_session_then_takes(tmp_path, config, context):
    config = config | {"max_position_embeddings": 999}
    folder = write_folder(tmp_path / "a", config=config)
    loaded = load_model(folder, policy=KernelPolicy(kernels="reference"))
    caches = loaded.model.make_caches(context, plans.RING_SLACK)
    for start in range(0, context, plans.CHUNK_ON_CPU):
        tokens = mx.zeros(min(plans.CHUNK_ON_CPU, context - start), mx.int32)
        output = loaded.model(tokens, caches, phase=Phase.PREFILL, logits="last")
        mx.eval(output.logits)
    measured = sum(cache.nbytes for cache in caches)
    planned = plan(folder, context, sessions=3)
    assert planned.session_bytes == measured
    assert planned.cache_bytes == 3 * measured


def test_no_caches_take_nothing():
    assert session_bytes([], 100) == 0


SMALL = Plan("a", "llama", 2, 30, 40_000_000, 100, 2, 10_000_000, 1_000_000, 70_000_000)


def test_total_is_the_sum_that_the_text_shows():
    assert SMALL.total_bytes == 61_000_000
    assert SMALL.fits is True
    shown = repr(SMALL)
    for text in ("40.0 MB", "20.0 MB", "1.0 MB", "61.0 MB", "fits: 9.0 MB of 70.0 MB"):
        assert text in shown
    assert SMALL.as_dict()["total_bytes"] == 61_000_000
    assert SMALL.as_dict()["verdict"] == SMALL.verdict


def changed(**values):
    fields = {name: getattr(SMALL, name) for name in Plan.__slots__}
    return Plan(**(fields | values))


def test_verdict_says_what_would_fit():
    assert changed(free_bytes=51_000_000).fits is False
    assert "10.0 MB are lacking; about 50 tokens" in changed(free_bytes=51_000_000).verdict
    assert "smaller quantization" in changed(free_bytes=30_000_000).verdict
    kept = changed(checkpoint_bytes=4_000_000, free_bytes=66_000_000)
    assert "3.0 MB are lacking; checkpoint_bytes=2500000 would fit" in kept.verdict
    state = changed(checkpoint_bytes=4_000_000, state_bytes=2_000_000, free_bytes=52_600_000)
    assert "with checkpoint_bytes=0 about 47 tokens a session would fit" in state.verdict
    assert changed(free_bytes=None).fits is None
    assert "does not say" in changed(free_bytes=None).verdict


def test_hub_id_is_planned_from_headers_alone(tmp_path, monkeypatch):
    hub = serve_hub(tmp_path, monkeypatch)
    write_folder(hub.folder, shards=two_shards(llama_weights()))
    found, local = plan("owner/name", 50, revision="v1"), plan(hub.folder, 50)
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    assert found == replace(local, source="owner/name", free_bytes=found.free_bytes)
    with pytest.raises(SourceError, match="only the configuration was downloaded before"):
        plan("owner/name", 50, local_files_only=True)
    shutil.rmtree(hub.cache)
    with pytest.raises(SourceError, match="not downloaded before, and local_files_only forbids"):
        plan("owner/name", 50, local_files_only=True)
    with pytest.raises(SourceError, match="owner/small was not downloaded before"):
        plan(hub.folder, 50, local_files_only=True, config=drafting("owner/small"))


def test_a_context_beyond_reason_is_refused_at_once(tmp_path):
    with pytest.raises(OptionError, match="context=10000001 is more than 10000000"):
        plan(write_folder(tmp_path / "a"), 10_000_001)


def test_unknown_quantization_is_refused(tmp_path):
    with pytest.raises(OptionError, match="int9"):
        plan(write_folder(tmp_path / "a"), quantize="int9")


LOST = "mtp.fc.weight"


def drafting(draft):
    return RunnerConfig(draft=str(draft))


def drafter_bytes(folder, draft, **options):
    """What a drafter holds once it is loaded: weights, and the rows of one session."""
    loaded = load_model(folder, policy=KernelPolicy(kernels="reference"), **options)
    drafter = load_drafter(draft, loaded, **options)
    module = next(
        getattr(drafter, name) for name in ("head", "module", "model") if hasattr(drafter, name)
    )
    arrays = [
        part
        for slot in parameter_slots(module).values()
        for part in parts_of(
            slot.module.value if isinstance(slot.module, Matrix) and slot.is_matrix
            else getattr(slot.module, slot.attribute)
        )
    ]  # fmt: skip
    caches = drafter.new_state(70).caches
    return sum(array.nbytes for array in arrays), session_bytes(caches, 70)


@pytest.mark.parametrize("quantize", [None, "int8-g32"])
def test_the_checkpoint_s_own_head_is_counted(tmp_path, quantize):
    folder = write_qwen(tmp_path / "a")
    planned = plan(folder, 70, 3, quantize=quantize)
    alone = plan(folder, 70, 3, quantize=quantize, config=drafting("off"))
    weights, rows = drafter_bytes(folder, "auto", quantize=quantize)
    assert (planned.drafter_bytes, planned.drafter_session_bytes) == (weights, rows)
    assert planned.total_bytes - alone.total_bytes == weights + 3 * rows
    assert planned.weight_bytes == alone.weight_bytes
    assert "drafter " in repr(planned)
    assert "of it the drafter's" in repr(planned)
    assert "drafter" not in repr(alone)
    assert plan(folder, 70, config=drafting("ngram")).drafter_bytes == 0
    assert plan(folder, 70, config=drafting("mtp")).drafter_bytes == plan(folder, 70).drafter_bytes


def test_a_drafter_of_its_own_files_is_counted(tmp_path):
    folder = write_qwen(tmp_path / "a")
    blocks = write_blocks(tmp_path / "blocks")
    planned = plan(folder, 70, config=drafting(blocks))
    assert (planned.drafter_bytes, planned.drafter_session_bytes) == drafter_bytes(folder, blocks)
    target, small = write_tiny_checkpoint(tmp_path / "b"), tmp_path / "small"
    write_tiny_checkpoint(small, num_hidden_layers=1)
    planned = plan(target, 70, config=drafting(small))
    assert planned.drafter_bytes == plan(small, 70).weight_bytes
    assert (planned.drafter_bytes, planned.drafter_session_bytes) == drafter_bytes(target, small)


def refused_draft(target, draft, *words):
    """Both a plan and loading refuse it in the same words."""
    said = []
    for ask in (turbospark.plan, turbospark.load):
        with pytest.raises(OptionError) as caught:
            ask(target, draft=str(draft))
        said.append(str(caught.value))
    assert said[0] == said[1]
    for word in words:
        assert word in said[0]


def test_a_draft_model_that_loading_refuses_is_not_planned(tmp_path, monkeypatch):
    hub = serve_hub(tmp_path, monkeypatch)
    target, small = write_tiny_checkpoint(hub.folder), tmp_path / "small"
    write_tiny_checkpoint(small, vocab_size=200)
    refused_draft(target, small, f"draft model {small} has 200 rows for the 259 tokens")
    write_tiny_checkpoint(small)
    path = small / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(described))
    refused_draft(target, small, "tokenizer is not the model's own: token 97 is")
    with pytest.raises(OptionError, match="tokenizer is not the model's own"):
        plan("owner/name", config=drafting(str(small)))
    path = write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=q8_0))
    refused_draft(target, path, "it has 263 tokens, the model's has 259")
    refused_draft(path, target, "it has 259 tokens, the model's has 263")


def test_a_wish_for_a_drafter_is_read_as_loading_reads_it(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "a")
    own = write_qwen(tmp_path / "b")
    assert turbospark.plan(own, context=70).drafter_bytes > 0
    monkeypatch.setenv("TURBOSPARK_DRAFT", "off")
    monkeypatch.setenv("TURBOSPARK_CHECKPOINT_BYTES", "0")
    found = turbospark.plan(own, context=70)
    assert found.drafter_bytes == found.checkpoint_bytes == 0
    assert turbospark.plan(own, context=70, checkpoint_bytes="10000000").checkpoint_bytes > 0
    with pytest.raises(OptionError, match="checkpoint_bytes=-1"):
        turbospark.plan(own, checkpoint_bytes=-1)
    monkeypatch.undo()
    assert turbospark.plan(folder, context=70, draft=None).drafter_bytes == 0
    with pytest.raises(OptionError, match="draft=5 is not text"):
        turbospark.plan(folder, draft=5)


def test_a_drafter_that_is_not_there_is_refused_as_loading_does(tmp_path):
    folder = write_folder(tmp_path / "a")
    assert plan(folder, 70).drafter_bytes == 0
    lacking = write_qwen(tmp_path / "b", change=lambda name, value: None if name == LOST else value)
    assert plan(lacking, 70).drafter_bytes == 0  # which loading logs
    with pytest.raises(CheckpointError, match="fc"):
        plan(lacking, 70, config=drafting("mtp"))
    with pytest.raises(OptionError, match="draft='mtp' cannot be had: no model of the family"):
        plan(folder, 70, config=drafting("mtp"))
    with pytest.raises(SourceError, match="no such file"):
        plan(folder, 70, config=drafting("./nowhere"))

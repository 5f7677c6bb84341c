"""`ts.inspect` over every family: what a checkpoint is made of, and what it can be used for."""

import json
import shutil

import pytest
from golden.tiny import TINY
from loading.drafter_files import write_blocks, write_head, write_qwen
from loading.files import gguf_metadata, gguf_tensors, q8_0, write_gguf

import turbospark as ts
from turbospark.caches.rollback import rewind_bound
from turbospark.cli.main import main
from turbospark.errors import CheckpointError, ConfigError, OptionError
from turbospark.loading.plan import LONGEST_CONTEXT, plan
from turbospark.registry import resolve_family
from turbospark.runner.abilities import abilities
from turbospark.runner.refusals import Traits, refusal
from turbospark.settings import UNBUILT
from turbospark.speculation.ngram import NgramDrafter
from turbospark.testing import ScriptedModel, synthetic

ABILITIES = [
    "reuse", "rewind", "chunks", "mtp", "dflash", "ngram", "draft model", "streaming", "KV bits",
]  # fmt: skip


@pytest.mark.parametrize("model_type", TINY)
def test_every_family_is_described_as_it_is_planned_and_loaded(tmp_path, model_type):
    folder = synthetic(tmp_path / "a", model_type=model_type)
    found, planned = ts.inspect(folder, context=300), plan(folder, 300)
    made = found.structure
    assert found.refused == ""
    assert planned.file_bytes == found.nbytes
    # A family may widen a vector on its way in.
    assert sum(each.nbytes for each in made.tensors) == pytest.approx(found.nbytes, rel=0.02)
    assert made.session_bytes == planned.session_bytes
    assert sum(each.parameters for each in made.tensors) == found.parameters
    assert sum(group.count for group in made.layers) == found.config["num_hidden_layers"]
    routed = [each for each in made.tensors if each.name == "experts"]
    assert (found.parameters > found.active_parameters) == bool(routed)
    assert all("4 bits, groups of 64" in each.layouts for each in routed)
    assert list(found.abilities) == ABILITIES
    loaded = ts.load(folder, kernels="reference", max_context=300)
    traits = Traits.of(loaded.model, loaded.runner.session.caches, NgramDrafter())
    assert found.abilities["ngram"][0] == (refusal("draft", traits) is None)
    assert found.abilities["mtp"][1] == loaded.drafter.reason


@pytest.mark.parametrize("model_type", TINY)
def test_a_configuration_alone_is_described(tmp_path, model_type):
    config = TINY[model_type] | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ts.inspect(tmp_path)
    model = resolve_family(model_type).build(config)
    assert found.refused == "there are no weights"
    assert found.tensors == ()
    assert sum(group.count for group in found.structure.layers) == config["num_hidden_layers"]
    caches = model.make_caches(found.structure.context, 128)
    assert sum(group.count for group in found.structure.caches) == len(caches)
    assert ("until a window has wrapped" in found.abilities["rewind"][1]) == (
        rewind_bound(caches) is not None and not any(cache.recurrent for cache in caches)
    )
    json.dumps(found.as_dict())
    assert "loads         no: there are no weights" in repr(found)


def test_layers_are_told_apart(tmp_path):
    shown = repr(ts.inspect(synthetic(tmp_path / "a", "moe")))
    for line in (
        "4 x window 16 attention, 4 heads of 32, 2 of keys and values; 3 of 8 experts of 64, MLP",
        "2 x full attention, 4 heads of 64, 1 of keys and values; 3 of 8 experts of 64, MLP of 192",
        "router        6,192 in 12 tensors, 6.6 kB: ",
    ):
        assert line in shown
    shared = repr(ts.inspect(synthetic(tmp_path / "b", "sliding", num_kv_shared_layers=3)))
    assert "3 x attention to an earlier layer's rows; MLP of 192" in shared
    recurrent = repr(ts.inspect(synthetic(tmp_path / "c", model_type="qwen3_5_moe")))
    assert "3 x delta net, 4 states of 32 x 32; 3 of 8 experts of 64, a shared expert" in recurrent
    assert "rewind        yes: to the checkpoints that recurrent layers keep" in recurrent


def test_bytes_of_a_session_follow_the_context(tmp_path):
    folder = synthetic(tmp_path / "a", "sliding")
    trained, short = ts.inspect(folder).structure, ts.inspect(folder, context=40).structure
    assert (trained.context, short.context) == (1024, 40)
    for context in (40, 1024):
        caches = ts.inspect(folder, context=context).structure.caches
        full = next(group for group in caches if group.kind == "rows of all tokens")
        assert full.nbytes == plan(folder, context).session_bytes - sum(
            group.nbytes for group in caches if group is not full
        )
    assert "0 tokens" not in repr(short)


def test_a_gguf_file_is_described(tmp_path):
    found = ts.inspect(write_gguf(tmp_path / "a.gguf", tensors=gguf_tensors(encode=q8_0)))
    assert [str(group.mixer) for group in found.structure.layers] == [
        "full attention, 3 heads of 32, 1 of keys and values"
    ]
    classes = {each.name: each.layouts for each in found.structure.tensors}
    assert classes["attention"] == {"8 bits, groups of 32": 8}
    assert sum(each.nbytes for each in found.structure.tensors) == found.nbytes
    unknown = gguf_metadata(**{"general.architecture": "homemade"})
    other = ts.inspect(write_gguf(tmp_path / "b.gguf", unknown))
    assert other.structure is None
    assert "'homemade' is not implemented" in other.refused
    assert other.abilities == {}


def test_refusals_are_told_in_the_runner_s_words():
    model = ScriptedModel(recurrent=1)
    model.takes_chunks = model.records_rows = False
    caches = model.make_caches(40, 0)
    traits = Traits.of(model, caches, NgramDrafter())
    can = abilities(model, caches, {"mtp": "there is none"}, has_experts=True)
    assert can["chunks"] == (False, refusal("prefill_chunk", traits))
    assert can["ngram"] == can["draft model"] == (False, refusal("draft", traits))
    assert can["mtp"] == (False, "there is none")
    assert can["streaming"] == (False, UNBUILT["residency"].reason)
    assert can["KV bits"] == (False, "a quantized KV cache is not built yet")
    ring = ScriptedModel(reach=0)
    can = abilities(ring, ring.make_caches(40, 0), {}, has_experts=False)
    assert can["rewind"][0] is False
    assert "cannot take back a token" in can["rewind"][1]


def test_drafters_are_found_where_they_lie(tmp_path):
    def without_head(name, value):
        return None if name.startswith("mtp.") else value

    folder = write_qwen(tmp_path / "model", change=without_head)
    assert "holds no mtp.* tensors" in ts.inspect(folder).abilities["mtp"][1]
    whole = ts.inspect(write_qwen(tmp_path / "whole"))
    assert whole.abilities["mtp"] == (True, "draft='auto' or 'mtp' takes the checkpoint's own "
                                            "prediction head")  # fmt: skip
    head = write_head(tmp_path / "model-mtp", prefix="mtp.", baked=True)
    blocks = write_blocks(tmp_path / "model-blocks")
    (tmp_path / "model-notes").mkdir()
    (tmp_path / "model-broken").mkdir()
    (tmp_path / "model-broken" / "config.json").write_text("{")
    can = ts.inspect(folder).abilities
    assert can["mtp"] == (True, f"draft={str(head)!r} takes the one that lies there")
    assert can["dflash"] == (True, f"draft={str(blocks)!r} takes the one that lies there")
    assert ts.load(folder, draft=can["mtp"][1].split("'")[1], kernels="reference").drafter
    shutil.copy(head / "model.safetensors", folder / "mtp.safetensors")
    inside = ts.inspect(folder).abilities["mtp"][1]
    assert str(folder / "mtp.safetensors") in inside
    other = synthetic(tmp_path / "llama", model_type="llama")
    write_head(tmp_path / "llama-mtp", prefix="mtp.", baked=True)
    assert ts.inspect(other).abilities["mtp"][0] is False


def test_matrices_are_counted_by_the_groups_that_each_has(tmp_path):
    found = ts.inspect(synthetic(tmp_path / "a", model_type="qwen4_exp"))
    assert found.quantization["4 bits, groups of 32"] == 1  # the table: rows of 32 numbers
    assert set(found.quantization) == {
        "4 bits, groups of 64", "8 bits, groups of 64", "4 bits, groups of 32", "BF16",
    }  # fmt: skip


def test_a_folder_without_a_tokenizer_is_not_said_to_load(tmp_path):
    folder = synthetic(tmp_path / "a")
    (folder / "tokenizer.json").unlink()
    assert ts.inspect(folder).refused == "there is no tokenizer.json and no tokenizer.model"
    (folder / "model.safetensors").unlink()
    assert ts.inspect(folder).refused == "there are no weights"


def test_damage_is_an_error_and_misfit_a_line(tmp_path):
    folder = synthetic(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    found = ts.inspect(folder)
    assert "tensors are missing" in found.refused
    assert found.structure is not None
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    assert "hidden_size='wide' must be a whole number" in ts.inspect(folder).refused
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        ts.inspect(folder)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ts.inspect(folder)
    weights.rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        ts.inspect(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contxt": 3}, "unknown option 'contxt'; did you mean 'context'"),
        ({"context": 0}, "context=0 is not a whole number above 0"),
        ({"context": LONGEST_CONTEXT + 1}, "is more than"),
    ],
)
def test_options_are_checked(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        ts.inspect(synthetic(tmp_path / "a"), **options)


def test_the_command_prints_text_or_json(tmp_path, capsys):
    folder = synthetic(tmp_path / "a", "moe")
    assert main(["inspect", str(folder), "--context", "77"]) == 0
    assert "at 77 tokens" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["abilities"]["chunks"]["served"] is True
    assert found["structure"]["layers"][1]["count"] == 2
    assert found["structure"]["session_bytes"] > 0
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err

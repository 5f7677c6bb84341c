"""The block drafter of muse_glimmer against transformers' own, over the trunk it drafts for."""

import json

import mlx.core as mx
import numpy as np
import pytest
from golden.drafter_fixtures import CONTEXT, load_drafter_golden
from golden.drafter_recipes import ACCEPTED, PROMPT
from golden.fixtures import build_model, float_weights, int4_weights, kernel_sets, load_golden
from loading.drafter_files import save
from loading.files import write_folder

from turbospark.errors import ConfigError
from turbospark.kernels.device import on_cpu
from turbospark.kernels.reference import ReferenceKernels
from turbospark.loading.build import load_model
from turbospark.loading.drafters import load_drafter
from turbospark.loading.install import Handling, install_weights
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.registry import resolve_family
from turbospark.runner.generation import admit, collect, run
from turbospark.runner.options import read_options
from turbospark.runner.runner import Runner
from turbospark.sessions.checkpoints import Checkpoints
from turbospark.sessions.pool import SessionPool
from turbospark.sessions.session import Session
from turbospark.settings import KernelPolicy
from turbospark.speculation.dflash import DFlashDrafter
from turbospark.testing import ByteTokenizer

GOLDEN, TRUNK = load_drafter_golden("muse_assistant"), load_golden("muse_glimmer")
ARRAYS = GOLDEN.arrays
BUILD = resolve_family("muse_glimmer").drafters["dflash"]
KERNELS = kernel_sets()


def pair(kernels=None, weights=float_weights, **config):
    """A trunk and its drafter, bound."""
    kernels = kernels or ReferenceKernels()
    trunk = build_model(TRUNK.config, weights(TRUNK), kernels)
    module = BUILD(GOLDEN.config | config, trunk)
    found = module.sanitize({name: mx.array(value) for name, value in GOLDEN.weights.items()})
    install_weights(module, found, "the golden drafter", Handling(on_cpu()))
    bind_units(module, kernels)
    return trunk, module


def context_of(module, turn, sizes=None, slack=3):
    caches, aux, at = module.make_caches(CONTEXT, slack), ARRAYS[f"aux{turn}"], 0
    for size in sizes or [len(aux)]:
        module.write(mx.array(aux[at : at + size]), caches, Phase.PREFILL)
        at += size
    assert at == len(aux)
    return caches


def block_of(module, turn, **given):
    masks = [module.config.mask_token_id] * (module.rows - 1)
    tokens = mx.array([int(ARRAYS[f"anchor{turn}"]), *masks], mx.int32)
    return np.array(module.hidden(tokens, context_of(module, turn, **given), Phase.DECODE))


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("kernels", sorted(KERNELS))
def test_a_block_equals_transformers(kernels, turn):
    _, module = pair(KERNELS[kernels])
    hidden = block_of(module, turn)
    assert np.abs(hidden - ARRAYS[f"hidden{turn}"]).max() < 6e-5  # three layers
    logits = np.array(module.logits(mx.array(hidden), Phase.DECODE))
    assert np.abs(logits - ARRAYS[f"logits{turn}"]).max() < 5e-4
    caches = context_of(module, turn)
    tokens, _ = module.propose(int(ARRAYS[f"anchor{turn}"]), caches)
    assert np.array(tokens).tolist() == ARRAYS[f"proposals{turn}"].tolist()


def test_streams_of_its_trunk_lead_to_the_same_proposals():
    trunk, module = pair()
    states, context = trunk.make_caches(CONTEXT, 16), module.make_caches(CONTEXT, 3)

    def follow(ids):
        tokens = mx.array(np.asarray(ids, np.int32))
        out = trunk(tokens, states, phase=Phase.PREFILL, logits="all", taps=module.taps)
        streams = mx.concatenate([out.taps[tap] for tap in module.taps], axis=-1)
        module.write(streams, context, Phase.PREFILL)
        return int(np.array(out.logits[-1]).argmax())

    anchor, ids = follow(ARRAYS["ids1"]), ARRAYS["proposals1"]
    assert anchor == ARRAYS["anchor1"]
    first, _ = module.propose(anchor, context)
    assert np.array(first).tolist() == ids.tolist()
    assert follow([anchor, *ids[:ACCEPTED]]) == ARRAYS["anchor2"]
    assert context[0].offset == PROMPT + 1 + ACCEPTED
    second, _ = module.propose(int(ARRAYS["anchor2"]), context)
    assert np.array(second).tolist() == ARRAYS["proposals2"].tolist()


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_context_written_in_portions_is_the_same(size):
    _, module = pair()
    count = len(ARRAYS["aux2"])
    sizes = [min(size, count - at) for at in range(0, count, size)]
    assert np.array_equal(block_of(module, 2, sizes=sizes), block_of(module, 2))


@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_context_that_went_back_is_the_same(back):
    _, module = pair()
    caches, aux = context_of(module, 2), ARRAYS["aux2"]
    for cache in caches:
        cache.rewind(back)
    module.write(mx.array(aux[-back:]), caches, Phase.PREFILL)
    one, other = (
        np.array(module.propose(5, given)[1]) for given in (caches, context_of(module, 2))
    )
    assert np.array_equal(one, other)


def moved(module):
    return np.abs(block_of(module, 1) - ARRAYS["hidden1"]).max()


def test_each_row_sees_a_window_of_its_own_both_ways():
    _, module = pair()
    sliding = [module.layers[i].self_attn for i in (0, 2)]
    assert [one._reach for one in sliding] == [4, 4]
    assert module.rows > 4 + 1  # the first row does not see the last one
    for attribute, value in (("_slides", False), ("_causal", True), ("_reach", 3)):
        _, module = pair()
        for i in (0, 2):
            setattr(module.layers[i].self_attn, attribute, value)
        assert moved(module) > 0.01, attribute


def test_table_rows_are_not_normed_for_it():
    trunk, module = pair()
    tokens = mx.array([3, 7], mx.int32)
    assert mx.array_equal(module.embed(tokens), trunk.model.embed_tokens.weight[tokens])
    module.embed = trunk.embed
    assert moved(module) > 0.01


def test_what_its_config_leaves_out_is_that_of_the_release():
    trunk = build_model(TRUNK.config, float_weights(TRUNK))
    small = {"hidden_size": 128, "mask_token_id": 9, "target_layer_ids": [0], "layer_types": None}
    module = BUILD({"model_type": "muse_glimmer_assistant"} | small, trunk)
    assert module.rows == 16
    assert module.config.windows == (2048,) * 5
    assert not any(module.config.is_causal(i) for i in range(5))
    rope = module.layers[0].self_attn._rope
    assert rope.inv_freq[1] == pytest.approx(500_000 ** (-1 / 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden_size": 64}, "hidden_size=64, the model has 128"),
     ({"target_layer_ids": [1, 7]}, "target layer 7, the model has 7"),
     ({"mask_token_id": 320}, "mask_token_id=320 of a vocabulary of 320"),
     ({"block_size": 1}, "a block of 1 rows"), ({"num_hidden_layers": "3"}, "num_hidden_layers")],
)  # fmt: skip
def test_a_drafter_of_another_model_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        pair(**changes)


def test_a_path_leads_to_it(tmp_path):
    write_folder(tmp_path / "trunk", TRUNK.weights, TRUNK.config)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(GOLDEN.config))
    save(tmp_path / "drafter", GOLDEN.weights)
    target = load_model(tmp_path / "trunk", policy=KernelPolicy(kernels="reference"))
    drafter = load_drafter(tmp_path / "drafter", target)
    assert isinstance(drafter, DFlashDrafter)
    proposals, _ = drafter.module.propose(int(ARRAYS["anchor1"]), context_of(drafter.module, 1))
    assert np.array(proposals).tolist() == ARRAYS["proposals1"].tolist()
    quantized = load_drafter(tmp_path / "drafter", target, quantize="int4")
    assert quantized.module.fc.value.bits == 4


@pytest.mark.parametrize("weights", [float_weights, int4_weights])
@pytest.mark.parametrize("block", [1, 3, 6])
def test_the_text_is_the_plain_one(block, weights):
    trunk, module = pair(weights=weights)
    texts = []
    for drafter in (None, DFlashDrafter(module)):
        state = None if drafter is None else lambda drafter=drafter: drafter.new_state(CONTEXT)

        def new_session(state=state):
            return Session(
                lambda: trunk.make_caches(CONTEXT, 16), CONTEXT,
                make_drafter_state=state, checkpoints=Checkpoints(1 << 20, 8),
            )  # fmt: skip

        runner = Runner(trunk, SessionPool(new_session, 1), drafter, prefix_reuse=True)
        options = {"max_tokens": 24} | ({"draft_block": block} if drafter else {})
        prompt = ARRAYS["ids1"].tolist()
        generation = admit(
            runner, ByteTokenizer(), prompt, read_options(options), stop_ids=frozenset(), chunk=8
        )
        result = collect(run(runner, generation))
        texts.append(runner.session.fed_ids.ids)
    assert result.drafted > 0
    assert texts[0] == texts[1]

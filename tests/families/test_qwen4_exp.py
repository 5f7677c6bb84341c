"""What is particular about qwen4_exp: each test fails on the mistake it is named after."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import (
    assert_same_logits,
    build_model,
    feed,
    float_weights,
    int4_weights,
    kernel_sets,
    load_golden,
    passes,
)
from golden.tiny import tiny_model
from kernels.cases_gpu import EMULATION
from metal_emu import require_emulator
from mlx.utils import tree_flatten

from families.qwen4_exp import FAMILY
from turbospark.caches.kv import KVCache
from turbospark.caches.rollback import checkpoint, retain
from turbospark.kernels.device import on_cpu
from turbospark.kernels.gpu.target import GpuKernels
from turbospark.kernels.reference import ReferenceKernels
from turbospark.nn import block_sparse
from turbospark.nn.block_sparse import IndexedRows, SparseInputs
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.runner.runner import Runner
from turbospark.runner.step import CompiledModel
from turbospark.sessions.prefix import decide_reuse
from turbospark.sessions.session import Session
from turbospark.settings import KernelPolicy

TOKENS = np.random.default_rng(5).integers(0, 67, size=31).astype(np.int32)
KERNELS = kernel_sets()
DENSE_ROWS = 11  # of the fixture: budget 8, ratio 4


@pytest.fixture(scope="module")
def golden():
    return load_golden("qwen4_exp")


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("qwen4_exp")


def built(golden, **changes):
    return build_model(golden.config | changes, float_weights(golden))


def run(model, tokens, *, caches=None):
    return feed(model, tokens, [len(tokens)], caches=caches)


def test_rows_beyond_the_budget_read_chosen_blocks_only(golden):
    sparse = run(built(golden), golden.tokens)
    dense = run(built(golden, indexer_budget=64), golden.tokens)
    moved = np.flatnonzero((sparse != dense).any(axis=1))
    assert moved[0] >= DENSE_ROWS
    assert np.abs(sparse - dense).max() > 0.1
    assert golden.difference(dense, "full") > 0.1


def test_up_to_the_budget_and_a_ragged_block_everything_is_read(golden, monkeypatch):
    """Choosing from so few rows would choose them all: nothing but the index's rows is computed."""
    asked = []
    scores = block_sparse.block_scores_reference
    monkeypatch.setattr(
        block_sparse, "block_scores_reference", lambda q, k: (asked.append(len(q)), scores(q, k))[1]
    )
    model = built(golden)
    run(model, golden.tokens[:DENSE_ROWS])
    assert asked == []
    run(model, golden.tokens[: DENSE_ROWS + 2])
    assert asked == [2, 2]  # the two layers that attend


@pytest.mark.parametrize("size", [1, 3, 7, 11, 12, 40])
@pytest.mark.parametrize("kernels", sorted(KERNELS))
def test_where_a_chunk_crosses_the_budget_does_not_matter(golden, size, kernels):
    model = build_model(golden.config, float_weights(golden), KERNELS[kernels])
    whole = run(model, golden.tokens)
    assert_same_logits(model, feed(model, golden.tokens, passes(40, size)), whole)


@pytest.mark.parametrize("sizes", [[40], [13, 27], [1] * 40])
def test_rows_gathered_side_by_side_equal_rows_one_by_one(golden, monkeypatch, sizes):
    """As a GPU does it."""
    model = built(golden)
    wanted = run(model, golden.tokens)
    monkeypatch.setattr(block_sparse, "on_cpu", lambda: False)
    np.testing.assert_allclose(feed(model, golden.tokens, sizes), wanted, atol=2e-5)


@pytest.mark.parametrize("start", [1, 4, 8, 9, 120, 127, 128, 131, 300])
def test_a_compiled_step_equals_an_eager_one_wherever_it_starts(tiny, start):
    tokens = np.random.default_rng(3).integers(0, 67, size=start + 11).astype(np.int32)
    runs = []
    mx.disable_compile()
    try:
        for model in (CompiledModel(tiny), tiny):
            caches, rows = tiny.make_caches(512, 9), []
            tiny(mx.array(tokens[:start]), caches, phase=Phase.PREFILL, logits="none")
            for at, size in ((start, 3), (start + 3, 1), (start + 4, 7)):
                step = mx.array(tokens[at : at + size])
                rows.append(np.array(model(step, caches, phase=Phase.DECODE, logits="all").logits))
            runs.append(np.concatenate(rows))
    finally:
        mx.enable_compile()
    np.testing.assert_allclose(*runs, atol=1e-4)


def test_equal_scores_choose_the_same_blocks_in_any_portion(golden):
    """All index queries are zero, so that every score is."""
    weights = float_weights(golden)
    for name in list(weights):
        if name.endswith("indexer.q_layernorm.weight"):
            weights[name] = weights[name] * 0 - 1  # stored as weight - 1
    model = build_model(golden.config, weights)
    whole = run(model, golden.tokens)
    assert_same_logits(model, feed(model, golden.tokens, [1] * 40), whole)
    layer = next(layer for layer in model.layers if not layer.is_linear).self_attn
    x = mx.array(np.random.default_rng(1).normal(size=(24, 64)).astype(np.float32))
    runs = []
    for changed in (5, 9):  # rows of the second and of the third block
        rows = mx.concatenate([x[:changed], x[changed : changed + 1] + 1, x[changed + 1 :]])
        caches = IndexedRows(KVCache(2, 64, 64), KVCache(1, 32, 64))
        runs.append(np.array(layer(rows, caches, Phase.PREFILL))[23])
    caches = IndexedRows(KVCache(2, 64, 64), KVCache(1, 32, 64))
    plain = np.array(layer(x, caches, Phase.PREFILL))[23]
    assert [np.array_equal(plain, other) for other in runs] == [False, True]


def test_layer_types_of_three_spellings_are_one_model(golden):
    runs = []
    for kind in ("full_attention", "indexed_attention", "qwen_sparse_attention"):
        kinds = ["linear_attention", "linear_attention", kind] * 2
        runs.append(run(built(golden, layer_types=kinds), golden.tokens[:17]))
    unlisted = {k: v for k, v in golden.config.items() if k != "layer_types"}
    model = build_model(unlisted | {"full_attention_interval": 3}, float_weights(golden))
    runs.append(run(model, golden.tokens[:17]))
    assert all(np.array_equal(runs[0], other) for other in runs[1:])


def test_layers_with_ngrams_are_counted_from_one(golden):
    assert golden.config["ple_layer_ids"] == [2, 5]
    layers = built(golden).layers
    assert [i for i, layer in enumerate(layers) if layer.ngrams is not None] == [1, 4]


def test_only_the_first_of_several_ends_of_text_parts_ngrams(golden):
    runs = [
        run(built(golden, eos_token_id=ids), golden.tokens) for ids in (133, [133, 288], [288, 133])
    ]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_an_end_of_text_between_two_passes_parts_ngrams(golden):
    ends = np.flatnonzero(golden.tokens == 133)
    assert ends.tolist() == [22, 24, 33]
    model = built(golden)
    whole = run(model, golden.tokens)
    for end in ends:
        for cut in (end, end + 1, end + 2):
            rest = [cut, len(golden.tokens) - cut]
            assert_same_logits(model, feed(model, golden.tokens, rest), whole)


def test_the_gate_of_a_delta_net_is_what_the_configuration_says(golden):
    logits = run(built(golden), golden.tokens)
    assert golden.difference(logits, "full") < golden.tolerance
    assert golden.difference(run(built(golden, output_gate_type=None), golden.tokens), "full") > 0.1


def session_of(model):
    return Session(lambda: model.make_caches(64, 5), 64)


def fill(session, model, tokens):
    start = session.position
    feed(model, tokens, [len(tokens)], caches=session.caches)
    session.record(tokens.tolist(), start)


def test_a_session_that_was_reset_says_what_a_new_one_says(tiny):
    session = session_of(tiny)
    fill(session, tiny, TOKENS)
    session.reset()
    fresh = tiny.make_caches(64, 5)
    for ours, new in zip(session.caches, fresh, strict=True):
        assert ours.offset == 0
        if ours.recurrent:
            pairs = zip(ours.state, new.state, strict=True)
            assert all(np.array_equal(*pair) for pair in pairs)
    again = feed(tiny, TOKENS[:9], [9], caches=session.caches)
    assert np.array_equal(again, feed(tiny, TOKENS[:9], [9], caches=fresh))


@pytest.mark.parametrize("part", [0, 1])
def test_what_ngrams_remember_shows_if_it_is_forgotten(tiny, part):
    """The filter's rows, and the tokens before."""
    caches = tiny.make_caches(64, 5)
    feed(tiny, TOKENS[:20], [20], caches=caches)
    forgetful = [cache.fork() for cache in caches]
    states = [cache for cache in forgetful if cache.recurrent and cache.state[-1].dtype == mx.int32]
    assert len(states) == 2
    for cache in states:
        empty = tiny.make_caches(64, 5)[forgetful.index(cache)].state
        kept = list(cache.state)
        kept[part] = empty[part]
        cache.place(20, tuple(kept))
    runs = [feed(tiny, TOKENS[20:24], [4], caches=each) for each in (caches, forgetful)]
    assert np.abs(runs[0] - runs[1]).max() > 1e-3


def test_reuse_knows_that_the_state_cannot_be_taken_back(tiny):
    session = session_of(tiny)
    fill(session, tiny, TOKENS[:20])
    assert session.recurrent
    parted = [*TOKENS[:15].tolist(), 66, 66]
    decision = decide_reuse(session.candidate(), parted)
    assert decision.tokens == 0
    assert "recurrent layers cannot go back" in decision.reason
    assert decide_reuse(session.candidate(), [*TOKENS[:20].tolist(), 3]).tokens == 20


@pytest.mark.parametrize("keep", range(1, 7))
@pytest.mark.parametrize("forgotten", ["filter", "tokens"])
def test_ngrams_that_are_not_taken_back_show(tiny, keep, forgotten):
    caches = tiny.make_caches(64, 5)
    feed(tiny, TOKENS[:20], [20], caches=caches)
    point = checkpoint(caches)
    rows = TOKENS[20:26].copy()
    rows[keep:] = (rows[keep:] + 1) % 67
    out = tiny(mx.array(rows), caches, phase=Phase.DECODE, logits="all", record=True)
    after = {i: cache.state for i, cache in enumerate(caches) if cache.recurrent}
    retain(caches, point, keep, out.row_inputs)
    changed = []
    for i, (tail, last) in after.items():
        right = caches[i].state
        if right[1].dtype != mx.int32:
            continue
        changed.append(not all(map(np.array_equal, right, (tail, last))))
        wrong = (tail, right[1]) if forgotten == "filter" else (right[0], last)
        caches[i].place(20 + keep, wrong)
    wanted = feed(tiny, TOKENS[:30], [30])[20 + keep : 30]
    got = feed(tiny, TOKENS[20 + keep : 30], [10 - keep], caches=caches)
    assert changed == [keep < 6] * 2
    apart = np.abs(got - wanted).max()
    assert apart < 2e-5 if keep == 6 else apart > 1e-4


def sparse_layer():
    model = tiny_model("qwen4_exp")
    bind_units(model, ReferenceKernels())
    layer = next(layer for layer in model.layers if not layer.is_linear)
    return layer.self_attn, model.config


@pytest.mark.parametrize("back", range(1, 14))
def test_rows_and_index_are_taken_back_together(back):
    layer, config = sparse_layer()
    x = mx.array(np.random.default_rng(2).normal(size=(25, 8)).astype(np.float32))
    caches = IndexedRows(KVCache(2, 10, 64), KVCache(1, 9, 64))
    whole = np.array(layer(x, caches, Phase.PREFILL))
    for cache in (caches.rows, caches.index):
        cache.rewind(back)
    again = np.array(layer(x[25 - back :], caches, Phase.PREFILL))
    assert config.indexer_compress_ratio == 3
    assert np.array_equal(again, whole[25 - back :]) if on_cpu() else True


def test_an_index_that_is_not_taken_back_shows():
    layer, _ = sparse_layer()
    x = mx.array(np.random.default_rng(2).normal(size=(25, 8)).astype(np.float32))
    caches = IndexedRows(KVCache(2, 10, 64), KVCache(1, 9, 64))
    whole = np.array(layer(x, caches, Phase.PREFILL))
    caches.rows.rewind(5)
    caches.index.rewind(5)
    wrong = IndexedRows(caches.rows, KVCache(1, 9, 64))
    zeros = mx.zeros((20, 1, 9))
    wrong.index.append(zeros, zeros)
    assert not np.array_equal(np.array(layer(x[20:], wrong, Phase.PREFILL)), whole[20:])


def test_writing_rows_alone_serves_as_a_call():
    layer, config = sparse_layer()
    x = mx.array(np.random.default_rng(2).normal(size=(25, 8)).astype(np.float32))
    ours, theirs = (IndexedRows(KVCache(2, 10, 64), KVCache(1, 9, 64)) for _ in range(2))
    layer.write(x[:19], ours, Phase.PREFILL)
    layer(x[:19], theirs, Phase.PREFILL)
    runs = [np.array(layer(x[19:], caches, Phase.PREFILL)) for caches in (ours, theirs)]
    assert np.array_equal(*runs) if on_cpu() else np.allclose(*runs, atol=1e-5)
    assert config.indexer_budget == 6


def test_inputs_are_cut_by_rows():
    parts = [mx.arange(10 * width).reshape(5, 2 * width) for width in range(1, 7)]
    cut = SparseInputs(*parts).cut(1, 3)
    assert [part.shape[0] for part in cut] == [2] * 6
    assert all(np.array_equal(a, b[1:3]) for a, b in zip(cut, parts, strict=True))


def test_the_state_of_a_session_is_all_there(tiny):
    """Filter rows and two tokens of n-grams, filter rows and fast weights, rows and their index."""
    names = [
        tuple(part.shape for part in cache.state) if cache.recurrent else cache.head_dim
        for cache in tiny.make_caches(64, 5)
    ]
    delta = ((3, 72), (6, 5, 7))
    ngrams = ((9, 24), (2,))
    assert names == [delta, ngrams, delta, 10, 9, ngrams, delta]


def test_every_tensor_of_a_layer_of_each_kind_moves_the_logits(golden):
    model = build_model(golden.config, float_weights(golden))
    tokens = golden.tokens[:20]
    base = run(model, tokens)
    rng = np.random.default_rng(8)
    for path, value in tree_flatten(model.parameters()):
        *parents, leaf = path.split(".")
        if parents[1:2] == ["layers"] and parents[2] not in ("1", "2"):
            continue
        module = model
        for name in parents:
            module = module[int(name)] if name.isdigit() else getattr(module, name)
        strength = 3.0 if "indexer" in path else 0.1
        noise = rng.normal(size=value.shape).astype(np.float32) * strength
        setattr(module, leaf, value + mx.array(noise))
        moved = np.abs(run(model, tokens) - base).max()
        setattr(module, leaf, value)
        assert moved > 1e-4, path


PUBLISHED = {
    "model_type": "qwen4_exp_text", "vocab_size": 248_320, "hidden_size": 2560,
    "num_hidden_layers": 48, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid",
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320,
    "ple_layer_ids": [2], "ple_embed_dim": 2560, "ngram_size": 3, "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "seed": 1234,
    "ple_conv_kernel_size": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "eos_token_id": [248_044, 248_046], "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
}  # fmt: skip


def test_the_published_configuration_has_the_published_shapes():
    model = FAMILY.build(PUBLISHED)
    shapes = {path: value.shape for path, value in tree_flatten(model.parameters())}
    ple, attn = "model.layers.1.ple.", "model.layers.3.self_attn."
    assert shapes[ple + "ple_embedding.ngram_embedding.weight"] == (320_001_536, 160)
    assert shapes[ple + "key_proj.weight"] == (10_240, 2560)
    assert shapes[ple + "value_proj.weight"] == (2560, 2560)
    assert shapes[ple + "conv1d.weight"] == (10_240, 4, 1)
    assert shapes[ple + "norm_conv.weight"] == (10_240,)
    for part in ("attn", "mlp"):
        stem = f"model.layers.3.{part}_hyper_connection."
        assert shapes[stem + "hc_norm.weight"] == (10_240,)
        assert shapes[stem + "input_mix_weight_down.weight"] == (320, 10_240)
        assert shapes[stem + "input_mix_weight_up.weight"] == (10_240, 320)
        assert shapes[stem + "block_inject_weight.weight"] == (4, 10_240)
    assert "model.hyper_connection_mixer.block_inject_weight.weight" not in shapes
    assert shapes[attn + "indexer.index_qk_proj.weight"] == (640, 2560)
    assert shapes[attn + "indexer.k_layernorm.weight"] == (128,)
    assert "model.norm.weight" not in shapes
    kinds = [cache.recurrent for cache in model.make_caches(8, 5)]
    assert len(kinds) == 48 + 1 + 12
    assert sum(kinds) == 37
    head = FAMILY.drafters["mtp"](PUBLISHED, model)
    assert (
        len(tree_flatten(head.parameters())) == 31 + 2
    )  # queries and gates, and gate and up of experts, apart


def test_compiled_steps_of_a_gpu_equal_transformers(golden, monkeypatch):
    """Chosen rows gathered side by side, 4-bit products, one launch for what one launch does."""
    require_emulator()
    monkeypatch.setattr(block_sparse, "on_cpu", lambda: False)
    model = build_model(golden.config, int4_weights(golden), GpuKernels(EMULATION, KernelPolicy()))
    caches = model.make_caches(64, 5)
    rows = [feed(model, golden.tokens[:20], [20], caches=caches)]
    mx.disable_compile()
    try:
        steps = CompiledModel(model)
        rest = golden.tokens[20:]
        rows.append(feed(steps, rest, [1] * 16 + [4], phase=Phase.DECODE, caches=caches))
    finally:
        mx.enable_compile()
    assert golden.difference(np.concatenate(rows), "int4") < golden.tolerance


def test_rows_of_the_index_are_computed_with_every_pass(tiny, monkeypatch):
    """No logits hang on them before there is a choice: left alone, they would pile up."""
    session, evaluated = session_of(tiny), []
    runner, evaluate = Runner(tiny, session), mx.eval

    def recorded(*arrays):
        evaluated.append({id(array) for array in arrays})
        evaluate(*arrays)

    runner.prefill_chunk([3, 4], 0)
    monkeypatch.setattr(mx, "eval", recorded)
    runner.produce(9, 2)
    index = next(cache for cache in session.caches if not cache.recurrent and cache.head_dim == 9)
    assert {id(array) for array in index.tail_arrays} <= set.union(*evaluated)

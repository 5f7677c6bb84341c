"""What families refuse, by name, instead of running it wrongly."""

import pytest
from golden.tiny import TINY, tiny_model

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.registry import resolve_family


def build(model_type, **changes):
    raw = TINY[model_type] | {"model_type": model_type} | changes
    return resolve_family(model_type).build(raw)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "final_logit_softcapping", 30.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "hidden_activation", "gelu"),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("gemma4_text", "hidden_activation", "relu"),
        ("llama", "hidden_act", "gelu"),
        ("qwen3", "hidden_act", "quick_gelu"),
    ],
)
def test_a_value_not_implemented_is_refused_by_name(model_type, key, value):
    with pytest.raises(UnsupportedError, match=f"{key}={value!r}"):
        build(model_type, **{key: value})


@pytest.mark.parametrize("model_type", sorted(TINY))
@pytest.mark.parametrize("scaling", ["rope_scaling", "rope_parameters"])
def test_dynamic_rope_is_refused_everywhere(model_type, scaling):
    kind = {"rope_type": "dynamic", "factor": 2.0}
    if scaling == "rope_parameters" and model_type.startswith(("gemma", "spark")):
        kind = {"full_attention": kind}
    with pytest.raises(UnsupportedError, match="dynamic"):
        build(model_type, **{scaling: kind})


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_heads_no_multiple_of_kv_heads_are_refused(model_type):
    with pytest.raises(ConfigError, match="num_attention_heads=5 is not a multiple"):
        build(model_type, num_attention_heads=5)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_heads_that_do_not_divide_the_hidden_size_are_refused(model_type):
    with pytest.raises(ConfigError, match="hidden_size=26 is not a multiple"):
        build(model_type, hidden_size=26, head_dim=None)


@pytest.mark.parametrize("model_type", sorted(TINY))
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", ["24", 0, -1, 2.5, None, True, 10**9])
def test_a_size_of_another_kind_is_refused_by_name(model_type, key, value):
    with pytest.raises(ConfigError, match=rf"config\.json: {key}"):
        build(model_type, **{key: value})


def test_mistral_with_layers_of_two_kinds_is_refused():
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedError, match="layer_types"):
        build("mistral", layer_types=kinds)
    assert build("mistral", layer_types=["sliding_attention"] * 2).config.windows == (7, 7)


def test_mistral_without_the_key_has_a_window_and_with_null_has_none():
    raw = {key: value for key, value in TINY["mistral"].items() if key != "sliding_window"}
    family = resolve_family("mistral")
    assert family.build(raw | {"model_type": "mistral"}).config.windows == (4096, 4096)
    none = family.build(raw | {"model_type": "mistral", "sliding_window": None})
    assert none.config.windows == (None, None)


def test_qwen_windows_need_the_flag():
    assert build("qwen2").config.windows == (None, 7)
    assert build("qwen2", use_sliding_window=False).config.windows == (None, None)
    kinds = ["sliding_attention", "full_attention"]
    assert build("qwen3", layer_types=kinds).config.windows == (7, None)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_the_head_is_not_tied_unless_the_config_says_so(model_type):
    raw = {key: value for key, value in TINY[model_type].items() if key != "tie_word_embeddings"}
    model = resolve_family(model_type).build(raw | {"model_type": model_type})
    assert "lm_head" in model
    assert "lm_head" not in build(model_type, tie_word_embeddings=True)


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma3_reads_its_pattern_under_either_name(key):
    raw = {k: v for k, v in TINY["gemma3_text"].items() if k != "sliding_window_pattern"}
    model = resolve_family("gemma3_text").build(raw | {key: 3})
    assert model.config.schedule == ("sliding_attention",) * 2 + ("full_attention",)


def test_gemma4_shared_layers_need_one_to_share_with():
    with pytest.raises(ConfigError, match="num_kv_shared_layers=4 leaves layer"):
        build("gemma4_text", num_kv_shared_layers=4)
    with pytest.raises(ConfigError, match="num_kv_shared_layers=6"):
        build("gemma4_text", num_kv_shared_layers=6)
    with pytest.raises(ConfigError, match="num_kv_shared_layers=60"):
        build("gemma4_text", num_kv_shared_layers=60)


def test_gemma4_experts_need_their_sizes():
    with pytest.raises(ConfigError, match="top_k_experts=8"):
        build("gemma4_text", top_k_experts=8)
    with pytest.raises(ConfigError, match="num_experts=None"):
        build("gemma4_text", num_experts=None)


def test_gemma4_shapes_have_two_spellings():
    flat = tiny_model("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=1)
    own = {"head_dim": 14, "num_key_value_heads": 1}
    newer = build(
        "gemma4_text", attention_k_eq_v=True,
        per_layer_config={"2": own, "5": own},
    )  # fmt: skip
    shapes = [plan.heads for plan in flat._plans]
    assert shapes == [plan.heads for plan in newer._plans]
    assert (shapes[2].num_kv_heads, shapes[2].head_dim) == (1, 14)
    assert (shapes[0].num_kv_heads, shapes[0].head_dim) == (2, 10)


def test_gemma4_global_kv_heads_count_only_where_keys_serve_as_values():
    model = build("gemma4_text", attention_k_eq_v=False, num_global_key_value_heads=1)
    assert {plan.heads.num_kv_heads for plan in model._plans} == {2}


def test_gemma4_per_layer_tables_cover_the_vocabulary():
    with pytest.raises(ConfigError, match="vocab_size_per_layer_input=66"):
        build("gemma4_text", vocab_size_per_layer_input=66)

"""GGUF metadata in llama.cpp's words become a configuration; every tensor has a name."""

import pytest
from golden.tiny import TINY
from mlx.utils import tree_flatten

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.registry import GGUF_GROUP, known_types, resolve_family

METADATA = {
    "embedding_length": 24, "block_count": 2, "feed_forward_length": 40,
    "attention.head_count": 6, "attention.head_count_kv": 2, "attention.key_length": 10,
    "attention.value_length": 10, "context_length": 90, "rope.freq_base": 5e5,
    "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
EXPERTS = {"expert_count": 7, "expert_used_count": 3}
EXTRA = {
    "gemma3": {"attention.sliding_window": 7},
    "qwen3moe": EXPERTS | {"expert_feed_forward_length": 11},
}
ARCHITECTURES = known_types(GGUF_GROUP)


def metadata(architecture, **changes):
    fields = METADATA | EXTRA.get(architecture, {}) | changes
    kept = {key: value for key, value in fields.items() if value is not None}
    return {f"{architecture}.{key}": value for key, value in kept.items()}


def config_of(architecture, **changes):
    mapping = resolve_family(architecture, GGUF_GROUP).gguf[architecture]
    return mapping.config(metadata(architecture, **changes))


def model_of(architecture, **changes):
    config = config_of(architecture, **changes) | {"vocab_size": 67, "tie_word_embeddings": False}
    return resolve_family(architecture, GGUF_GROUP).build(config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metadata_give_sizes_and_rope(architecture):
    config = model_of(architecture).config
    assert (config.hidden_size, config.intermediate_size) == (24, 40)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (2, 90)
    heads = config.heads
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (6, 2, 10)
    assert config.rms_norm_eps == 1e-5
    assert config_of(architecture)["rope_theta"] == 5e5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_has_a_gguf_name(architecture):
    mapping = resolve_family(architecture, GGUF_GROUP).gguf[architecture]
    reached = {
        name.replace("{i}", str(layer)) for name in mapping.names.values() for layer in range(2)
    }
    parameters = {
        name.rpartition(".")[0] for name, _ in tree_flatten(model_of(architecture).parameters())
    }
    assert parameters <= reached
    optional = ("q_norm", "k_norm")
    if architecture == "llama":  # Mixtral's too
        optional += ("mlp.gate", "experts.gate_proj", "experts.up_proj", "experts.down_proj")
        mixtral = model_of("llama", **EXPERTS)
        sparse = {name.rpartition(".")[0] for name, _ in tree_flatten(mixtral.parameters())}
        assert sparse <= reached
    if architecture == "qwen3moe":
        optional += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert not {name for name in reached - parameters if not name.endswith(optional)}


def test_mixtral_is_a_llama_with_experts():
    config = config_of("llama", **EXPERTS)
    assert config["model_type"] == "mixtral"
    (plan, other) = model_of("llama", **EXPERTS).config.expert_plans
    assert plan == other
    assert (plan.count, plan.top_k, plan.inner, plan.renormalise) == (7, 3, 40, True)
    assert config_of("llama", expert_count=0)["model_type"] == "llama"
    with pytest.raises(ConfigError, match=r"lacks llama\.expert_used_count"):
        config_of("llama", expert_count=7)


def test_weights_of_qwen3moe_sum_to_one_as_in_llama_cpp():
    (plan, _) = model_of("qwen3moe").config.expert_plans
    assert (plan.count, plan.top_k, plan.inner, plan.renormalise) == (7, 3, 11, True)


def test_gemma3_fixed_values_are_those_of_llama_cpp():
    config = config_of("gemma3", block_count=7)
    model = resolve_family("gemma3_text").build(config | {"vocab_size": 67})
    assert [i for i, kind in enumerate(model.config.schedule) if kind == "full_attention"] == [5]
    assert model.config.sliding_window == 7
    assert model.config.query_pre_attn_scalar == 10
    assert config["rope_local_base_freq"] == 10_000.0
    largest = config_of("gemma3", block_count=62)
    assert largest["query_pre_attn_scalar"] == 24 // 6


def test_gemma3_norms_lose_their_offset_and_llama_rows_their_order():
    gemma3 = resolve_family("gemma3", GGUF_GROUP).gguf["gemma3"]
    assert gemma3.norm_offset == 1.0
    assert gemma3.interleaved_rope == ()
    flow = resolve_family("llama", GGUF_GROUP).gguf
    assert flow["llama"].interleaved_rope == ("q_proj", "k_proj")
    assert {name: flow[name].interleaved_rope for name in flow if name != "llama"} == {
        "qwen2": (), "qwen3": (), "qwen3moe": (),
    }  # fmt: skip
    assert all(mapping.norm_offset == 0 for mapping in flow.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rope_scaling_reads_old_and_new_keys(architecture):
    linear = {"rope_type": "linear", "factor": 4.0}
    new = config_of(architecture, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert new["rope_scaling"] == linear
    assert config_of(architecture, **{"rope.scale_linear": 4.0})["rope_scaling"] == linear
    assert config_of(architecture, **{"rope.scaling.type": "none"})["rope_scaling"] is None
    yarn = config_of(
        architecture,
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
           "rope.scaling.original_context_length": 30},
    )["rope_scaling"]  # fmt: skip
    assert yarn["rope_type"] == "yarn"
    assert yarn["original_max_position_embeddings"] == 30


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"), ("attention.value_length", 12),
        ("rope.dimension_count", 6), ("attention.head_count_kv", [2, 3]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metadata_not_implemented_are_refused_by_name(architecture, key, value):
    with pytest.raises(UnsupportedError, match=f"{architecture}.{key}|{key}"):
        config_of(architecture, **{key: value})


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {"llama", "qwen3moe"}))
def test_experts_where_there_are_none_are_refused_by_name(architecture):
    with pytest.raises(UnsupportedError, match=rf"{architecture}\.expert_count=8"):
        config_of(architecture, expert_count=8)


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "context_length"])
@pytest.mark.parametrize("value", [None, "24", 0, -1, 1.5])
def test_metadata_missing_or_malformed_are_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"llama.{key}"):
        config_of("llama", **{key: value})


def test_equal_numbers_of_a_list_are_one_number():
    assert config_of("llama", **{"attention.head_count_kv": [3, 3]})["num_key_value_heads"] == 3


def test_a_window_in_a_flow_that_has_none_is_refused():
    with pytest.raises(UnsupportedError, match=r"qwen2\.attention\.sliding_window=7"):
        config_of("qwen2", **{"attention.sliding_window": 7})


def test_tiny_configurations_cover_the_architectures():
    assert {name.replace("qwen3moe", "qwen3_moe") for name in ARCHITECTURES} <= set(TINY)

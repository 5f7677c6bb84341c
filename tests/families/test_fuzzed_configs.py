"""Any damage to a configuration is refused as such, or gives a model; nothing else happens."""

import pytest
from golden.tiny import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from turbospark.errors import ConfigError
from turbospark.registry import resolve_family

KEYS = sorted({key for config in TINY.values() for key in config})
ROPE_KEYS = ["rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"]
OTHER_KEYS = [
    "layer_types", "per_layer_config", "hidden_act", "_sliding_window_pattern",
    "layer_rope_theta",
]  # fmt: skip
NUMBERS = (
    st.integers(-2, 70)
    | st.sampled_from([2**31, -(2**63), 10**30, 10**400, 0.1, 1e300, 1e-300])
    | st.floats()
)
WORDS = st.sampled_from(
    ["", "default", "linear", "yarn", "llama3", "proportional", "full_attention", "silu", "8"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "rope_type", "rope_theta", "factor", "full_attention", "0",
                 "sliding_attention", "original_max_position_embeddings", "low_freq_factor",
                 "high_freq_factor", "partial_rotary_factor", "attention_factor", "head_dim"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=8,
)  # fmt: skip
CHANGES = st.dictionaries(
    st.sampled_from(KEYS + ROPE_KEYS * 3 + OTHER_KEYS), VALUES, min_size=1, max_size=3
)


TYPES = (
    "deepseek_v2", "gemma3_text", "gemma4_text", "gpt_oss", "llama", "mistral", "mixtral",
    "muse_glimmer", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen4_exp", "spark2_5",
)  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "model_type",
    TYPES,
)
@settings(max_examples=60, deadline=None)
@given(changes=CHANGES)
def test_a_damaged_config_is_refused_or_runs(model_type, changes):
    raw = TINY[model_type] | {"model_type": model_type} | changes
    try:
        model = resolve_family(model_type).build(raw)
    except ConfigError:
        return
    assert model.vocab_size == raw["vocab_size"]
    # A layer of qwen4_exp may have an index or a state of n-grams beside its own cache.
    most = 2 * model.num_layers if model_type == "qwen4_exp" else model.num_layers
    assert len(model.make_caches(64, 16)) <= most

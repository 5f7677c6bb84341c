"""Muse Glimmer's block drafter: a DFlash of the first kind over the trunk's table and head.

A block's rows see one another both ways, and each of them a window of rows before its own. They are
rows of the table as they are, without the norm that the trunk gives them.

Source: transformers 5.24, models/muse_glimmer_assistant. Checkpoint:
meta-models/Muse-Glimmer-30B-assistant.
"""

from collections.abc import Mapping
from typing import Any, cast

from turbospark.nn.dflash import DFlash
from turbospark.nn.dflash_config import check_trunk, read_dflash
from turbospark.nn.linear import Embedding, Matrix
from turbospark.nn.rope import read_rope

THETA = 500_000.0
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201_818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


class Assistant(DFlash):
    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Published names as the module's own."""
        found: dict[str, Any] = {}
        for name, value in super().sanitize(weights).items():
            prefix = next((prefix for prefix in NAMES if name.startswith(prefix)), "")
            found[NAMES.get(prefix, "") + name.removeprefix(prefix)] = value
        return found


def build_assistant(raw: Mapping[str, Any], model: Any) -> Assistant:
    """The block drafter of a trunk, with unset weights.

    Args:
        raw: the drafter checkpoint's config.json, which does not say how many tokens there are.
        model: the trunk.

    Raises:
        ConfigError: the config is damaged, or the drafter was made for another model.
    """
    table = cast("Embedding", model.model.embed_tokens)
    matrix = cast("Matrix", model.get("lm_head", table))
    vocab_size, width = table.value.shape
    given = {name: value for name, value in raw.items() if value is not None}
    given = {"vocab_size": vocab_size, **DEFAULTS, **given}
    layers = given["num_hidden_layers"]
    if "layer_types" not in given and isinstance(layers, int):
        given["layer_types"] = ["sliding_attention"] * min(layers, 4096)
    config = read_dflash(given | {"dflash_config": {"causal": False}})
    depth = cast("int", model.num_layers)
    check_trunk(config, width=width, vocab_size=vocab_size, layers=depth)
    rope = read_rope(raw, config.head_dim, config.max_position_embeddings, theta=THETA)
    return Assistant(config, rope, table, matrix, config.taps(depth), inclusive=True)

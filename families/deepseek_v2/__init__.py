"""deepseek_v2: latent attention, and routed experts beside shared ones.

A position's keys and values of all heads are made of one cached row. RoPE turns neighbouring
dimensions, and YaRN's `mscale_all_dim` stretches the attention scores.

Source: transformers 5.24, models/deepseek_v2. Checkpoints: deepseek-ai/DeepSeek-V2-Lite,
DeepSeek-V2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from families.deepseek_v2.config import read_deepseek
from families.deepseek_v2.model import DeepseekModel
from turbospark.nn.rope import read_rope, yarn_score_scale
from turbospark.protocols import Family


def build(raw: Mapping[str, Any]) -> DeepseekModel:
    """A deepseek_v2 model with unset weights."""
    config = read_deepseek(raw)
    rope = read_rope(raw, config.qk_rope_head_dim, config.max_position_embeddings)
    scale = config.sizes.query_dim**-0.5 * yarn_score_scale(raw)
    return DeepseekModel(config, replace(rope, traditional=True), scale)


FAMILY = Family(name="deepseek_v2", build=build)

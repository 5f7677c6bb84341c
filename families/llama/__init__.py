"""The llama flow: `llama`, `mistral`, `qwen2`, `qwen3`, and with experts `mixtral`, `qwen3_moe`.

One network; the types differ in what their configurations default to, in biases, in norms of the
heads, in which layers see a window only, and in whether their MLPs are routed experts.

Source: transformers 5.24, models/{llama,mistral,qwen2,qwen3,mixtral,qwen3_moe}. Checkpoints:
meta-llama/Llama-3.2-1B, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-0.5B, Qwen/Qwen3-0.6B,
mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B.
"""

from collections.abc import Mapping
from typing import Any

from families.llama.config import read_llama
from families.llama.model import LlamaModel
from turbospark.nn.gguf import BLOCK_NAMES, Metadata, common_config
from turbospark.nn.rope import read_rope
from turbospark.protocols import Family, GGUFMapping


def build(raw: Mapping[str, Any]) -> LlamaModel:
    """A model of the llama flow with unset weights; `model_type` says of which kind."""
    config = read_llama(raw)
    D, longest = config.heads.head_dim, config.max_position_embeddings
    return LlamaModel(config, read_rope(raw, D, longest, theta=config.default_theta))


def gguf_mapping(architecture: str) -> GGUFMapping:
    """How a GGUF file of an architecture of the llama flow reads.

    The metadata of `llama` and `qwen2` do not name a window, and llama.cpp uses none for them.
    """

    def config(metadata: Mapping[str, Any]) -> dict[str, Any]:
        fields = Metadata(metadata, architecture)
        fields.refuse("attention.sliding_window", 0)
        return common_config(fields) | {"model_type": architecture}

    return GGUFMapping(
        config=config,
        names=BLOCK_NAMES | {"blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm"},
        interleaved_rope=("q_proj", "k_proj") if architecture == "llama" else (),
    )


FAMILY = Family(
    name="llama",
    build=build,
    gguf={name: gguf_mapping(name) for name in ("llama", "qwen2", "qwen3")},
)

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
from families.llama.gguf import ARCHITECTURES, gguf_mapping
from families.llama.model import LlamaModel
from turbospark.nn.rope import read_rope
from turbospark.protocols import Family


def build(raw: Mapping[str, Any]) -> LlamaModel:
    """A model of the llama flow with unset weights; `model_type` says of which kind."""
    config = read_llama(raw)
    D, longest = config.heads.head_dim, config.max_position_embeddings
    return LlamaModel(config, read_rope(raw, D, longest, theta=config.default_theta))


FAMILY = Family(
    name="llama",
    build=build,
    gguf={name: gguf_mapping(name) for name in ARCHITECTURES},
)

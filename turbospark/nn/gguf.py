"""Reading GGUF metadata in the words of config.json."""

from collections.abc import Mapping
from typing import Any, cast

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.nn.config import Depth, Length, Positive, Size, read_value

_NEEDED = object()


class Metadata:
    """The fields of one architecture: `key` is read as `<architecture>.<key>`."""

    def __init__(self, values: Mapping[str, Any], architecture: str) -> None:
        self._values, self._architecture = values, architecture

    def read(self, key: str, hint: Any, default: Any = _NEEDED) -> Any:
        """A field, checked against a type hint; a list of equal numbers is read as the number.

        Raises:
            ConfigError: it is missing and has no default, or is of another type.
            UnsupportedError: it differs from layer to layer.
        """
        name = f"{self._architecture}.{key}"
        if name not in self._values:
            if default is _NEEDED:
                raise ConfigError(f"GGUF metadata lacks {name}")
            return default
        value = self._values[name]
        if isinstance(value, list):
            items = cast("list[Any]", value)
            if not items or any(item != items[0] for item in items):
                raise UnsupportedError(
                    f"GGUF metadata: {name}={items!r} differs by layer, which is not implemented"
                )
            value = items[0]
        return read_value(f"GGUF metadata: {name}", value, hint)

    def refuse(self, key: str, *allowed: Any) -> None:
        """Refuse a field whose value is none of `allowed`; an absent one always passes.

        Raises:
            UnsupportedError: naming the field.
        """
        name = f"{self._architecture}.{key}"
        value = self._values.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedError(f"GGUF metadata: {name}={value!r} is not implemented")


def common_config(fields: Metadata, *, experts: bool = False) -> dict[str, Any]:
    """What every decoder's metadata says: sizes, heads, norm and RoPE.

    Args:
        fields: of the architecture.
        experts: whether it may have routed experts, which the family then reads itself.

    Raises:
        ConfigError: a field is missing or malformed, or contradicts another.
        UnsupportedError: a value is not implemented.
    """
    hidden = fields.read("embedding_length", Size)
    heads = fields.read("attention.head_count", Size)
    if hidden % heads and fields.read("attention.key_length", Size, None) is None:
        raise ConfigError(
            f"GGUF metadata: embedding_length={hidden} is not a multiple of "
            f"attention.head_count={heads}, and there is no attention.key_length"
        )
    head_dim = fields.read("attention.key_length", Size, hidden // heads)
    fields.refuse("attention.value_length", head_dim)
    fields.refuse("rope.dimension_count", head_dim)
    if not experts:
        fields.refuse("expert_count", 0)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": fields.read("block_count", Depth),
        "intermediate_size": fields.read("feed_forward_length", Size),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.read("attention.head_count_kv", Size, heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.read("context_length", Length),
        "rms_norm_eps": fields.read("attention.layer_norm_rms_epsilon", Positive),
        "rope_theta": fields.read("rope.freq_base", Positive, 10_000.0),
        "rope_scaling": _rope_scaling(fields),
    }


def _rope_scaling(fields: Metadata) -> dict[str, Any] | None:
    kind = fields.read("rope.scaling.type", str, "none")
    # Files from before rope.scaling.* say only by how much positions are divided.
    divisor = fields.read("rope.scale_linear", Positive, 1.0)
    factor = fields.read("rope.scaling.factor", Positive, divisor)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind not in {"linear", "yarn"}:
        raise UnsupportedError(f"GGUF metadata: rope.scaling.type={kind!r} is not implemented")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        fields.refuse("rope.scaling.attn_factor", 1.0)
        fields.refuse("rope.scaling.yarn_log_multiplier", 0.0)
        fields.refuse("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        scaling["beta_fast"] = fields.read("rope.scaling.yarn_beta_fast", Positive, 32.0)
        scaling["beta_slow"] = fields.read("rope.scaling.yarn_beta_slow", Positive, 1.0)
        original = fields.read("rope.scaling.original_context_length", Length, None)
        if original is not None:
            scaling["original_max_position_embeddings"] = original
    return scaling


BLOCK_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
"""GGUF tensors that every dense decoder has, and their checkpoint names."""

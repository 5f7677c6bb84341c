"""Spark 2.5 in torch, which transformers has not: one full pass, written from the papers' formulas.

Names and shapes of tensors are those of XHToken/Spark-X2.5-4B.
"""

import copy
import json
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "layer_types": None}
PATTERN = ("sliding_attention",) * 3 + ("full_attention",)


class SparkConfig:
    """The fields of a config.json, with what published ones leave out."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        for name, value in (DEFAULTS | fields).items():
            setattr(self, name, value)
        count = self.num_hidden_layers
        self.kinds = self.layer_types or [PATTERN[i % len(PATTERN)] for i in range(count)]

    def to_json_string(self) -> str:
        fields = copy.deepcopy(self._fields) | {"model_type": "spark2_5", "layer_types": self.kinds}
        return json.dumps(fields)

    def get_text_config(self) -> "SparkConfig":
        return self


class Attention(torch.nn.Module):
    def __init__(self, config: SparkConfig, kind: str) -> None:
        super().__init__()
        C, Hq, Hkv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.sizes = [Hq, Hkv, Hkv]
        self.D = config.head_dim
        self.window = config.sliding_window if kind == "sliding_attention" else None
        self.rope = config.rope_parameters[kind]
        self.q_k_v_proj = torch.nn.Linear(C, sum(self.sizes) * self.D, bias=False)
        self.g_proj = torch.nn.Linear(C, Hq, bias=False)
        self.out_proj = torch.nn.Linear(Hq * self.D, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T = x.shape[0]
        heads = self.q_k_v_proj(x).view(T, -1, self.D).transpose(0, 1)
        q, k, v = heads.split(self.sizes)
        q, k = self.rotated(q), self.rotated(k)
        k, v = (one.repeat_interleave(self.sizes[0] // self.sizes[1], 0) for one in (k, v))
        age = torch.arange(T)[:, None] - torch.arange(T)[None]
        hidden = age < 0
        if self.window is not None:
            hidden = hidden | (age >= self.window)
        scores = (q @ k.mT * self.D**-0.5).masked_fill(hidden, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1)  # [T, Hq, D]
        return self.out_proj((out * self.g_proj(x).sigmoid()[..., None]).reshape(T, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        dims = int(self.D * self.rope.get("partial_rotary_factor", 1.0))
        powers = torch.arange(0, dims, 2).float() / dims
        angles = torch.arange(x.shape[1]).float()[:, None] / self.rope["rope_theta"] ** powers
        a, b, rest = x.split([dims // 2, dims // 2, self.D - dims], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class MLP(torch.nn.Module):
    def __init__(self, config: SparkConfig) -> None:
        super().__init__()
        C, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = torch.nn.Linear(C, inner, bias=False)
        self.up_proj = torch.nn.Linear(C, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.gelu(self.gate_proj(x)) * self.up_proj(x))


class Layer(torch.nn.Module):
    def __init__(self, config: SparkConfig, kind: str) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = torch.nn.RMSNorm(C, eps)
        self.post_attention_layernorm = torch.nn.RMSNorm(C, eps)
        self.self_attn, self.mlp = Attention(config, kind), MLP(config)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.self_attn(self.input_layernorm(h))
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(torch.nn.Module):
    def __init__(self, config: SparkConfig) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList([Layer(config, kind) for kind in config.kinds])
        self.norm = torch.nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class SparkForCausalLM(torch.nn.Module):
    def __init__(self, config: SparkConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embedding.weight

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        assert not use_cache, "it has no cache"
        h = self.model.embedding(input_ids[0])
        for layer in self.model.layers:
            h = layer(h)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(h))[None])

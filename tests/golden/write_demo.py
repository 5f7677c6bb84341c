"""Write what transformers says for the demo model's dequantized weights, in float32.

Run it from an environment of its own, `pip install torch transformers gguf`, then

    python tests/golden/write_demo.py MODEL.gguf

Nothing of turbospark takes part: the gguf package reads and dequantizes the file. For each prompt
tests/smoke/demo_logits.json holds its ids, the eight largest logits after it, what greedy decoding
appends, and the eight largest logits after all but the last of that.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

FILE = Path(__file__).parents[1] / "smoke" / "demo_logits.json"
STEPS = 32
WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm"}
LEAVES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def demo_config() -> Gemma3TextConfig:
    """Gemma 3 270M; GGUF states neither the schedule nor the base of sliding layers."""
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=32_768,
        attn_implementation="eager",
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )


def tensors(path: str) -> dict[str, torch.Tensor]:
    """The file's tensors in float32 under transformers' names; norms lose their offset of 1."""
    found: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(path).tensors:
        shape = [int(size) for size in tensor.shape][::-1]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        stem, _, layer_and_leaf = tensor.name.removesuffix(".weight").partition(".")
        layer, _, leaf = layer_and_leaf.partition(".")
        name = f"layers.{layer}.{LEAVES[leaf]}" if stem == "blk" else WHOLE[stem]
        found[f"model.{name}.weight"] = torch.tensor(values - 1 if "norm" in name else values)
    return found


def largest(logits: torch.Tensor) -> dict[str, Any]:
    values, ids = logits.topk(8)
    return {"ids": ids.tolist(), "logits": [round(value, 5) for value in values.tolist()]}


def described(model: Gemma3ForCausalLM, ids: list[int]) -> dict[str, Any]:
    """Greedy decoding over a cache, which one pass over everything must confirm."""
    feed, cache, rows, text = torch.tensor([ids]), None, [], []
    for _ in range(STEPS):
        out = model(feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        rows.append(out.logits[0, -1])
        text.append(int(rows[-1].argmax()))
        feed = torch.tensor([text[-1:]])
    whole = model(torch.tensor([ids + text[:-1]]), use_cache=False, logits_to_keep=STEPS)
    assert (whole.logits[0] - torch.stack(rows)).abs().max() < 1e-3
    return {"top": largest(rows[0]), "greedy": text, "top_after": largest(rows[-1])}


def main(path: str) -> None:
    torch.set_grad_enabled(False)
    model = Gemma3ForCausalLM(demo_config()).eval().float()
    missing, unknown = model.load_state_dict(tensors(path), strict=False)
    assert (missing, unknown) == (["lm_head.weight"], []), (missing, unknown)  # the head is tied
    assert model.lm_head.weight is model.model.embed_tokens.weight
    cases = json.loads(FILE.read_text(encoding="utf-8"))
    for case in cases.values():
        case |= described(model, case["ids"])
    lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

"""Drafters in torch: a head around transformers' own layer, and block drafters from the papers."""

import copy
import math
from typing import Any

import torch
from torch.nn import functional


class MTPHead(torch.nn.Module):
    """norm(layer(fc([norm_e(embed(t[i + 1])), norm_h(h[i])]))) at position i, with its own rows.

    Args:
        trunk: transformers' causal model.
        layer: its decoder layer class.
        norm: its norm class, which multiplies by 1 + weight.
    """

    def __init__(self, trunk: Any, layer: type, norm: type) -> None:
        super().__init__()
        config = copy.deepcopy(trunk.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config._attn_implementation = "eager"
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps)
        self.pre_fc_norm_hidden = norm(width, eps)
        self.layers = torch.nn.ModuleList([layer(config, 0)])
        self.norm = norm(width, eps)
        self.config = config

    def forward(
        self, trunk: Any, following: torch.Tensor, hidden: torch.Tensor, cache: Any, start: int
    ) -> torch.Tensor:
        from transformers.masking_utils import create_causal_mask

        embedded = self.pre_fc_norm_embedding(trunk.model.embed_tokens(following))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], -1))
        positions = torch.arange(start, start + following.shape[1])[None]
        rotation = trunk.model.rotary_emb(x, positions[None].expand(3, 1, -1))
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            cache=cache,
            position_ids=positions,
        )
        x = self.layers[0](
            x,
            position_embeddings=rotation,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
        )
        return self.norm(x if torch.is_tensor(x) else x[0])


class StreamsHead(torch.nn.Module):
    """layer(fc_h(norm(h))_c + fc_e(norm(embed(t[i + 1])))) over every stream c of h, at position i.

    The norm of h is one over all streams. Rows are never kept: a call computes all of them.

    Args:
        trunk: transformers' causal model.
        layer: its decoder layer class.
        mixer: its class of mixtures.
        norm: its norm class, which multiplies by 1 + weight.
    """

    def __init__(self, trunk: Any, layer: type, mixer: type, norm: type) -> None:
        super().__init__()
        config = copy.deepcopy(trunk.config)
        config.num_hidden_layers, config.layer_types = 1, ["indexed_attention"]
        config.ple_layer_ids = []
        config._attn_implementation = "eager"
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc_embedding = torch.nn.Linear(width, width, bias=False)
        self.fc_hidden = torch.nn.Linear(width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(config.hc_count * width, eps=eps)
        self.layers = torch.nn.ModuleList([layer(config, 0)])
        self.hyper_connection_mixer = mixer(config, use_combine=False)

    def forward(self, trunk: Any, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Streams [n, G * C] of n rows, from their following tokens [n] and hidden [n, G * C]."""
        count, width = len(following), trunk.config.hidden_size
        token = self.fc_embedding(self.pre_fc_norm_embedding(trunk.model.embed_tokens(following)))
        streams = self.fc_hidden(self.pre_fc_norm_hidden(hidden).view(count, -1, width))
        x = (streams + token[:, None]).view(1, count, -1)
        positions = torch.arange(count).view(1, 1, -1).expand(3, 1, -1)
        future = torch.ones(count, count).triu(1) * torch.finfo(torch.float32).min
        return self.layers[0](
            x,
            position_embeddings=trunk.model.rotary_emb(x, positions),
            attention_mask=future[None, None],
        )[0]

    def logits(self, trunk: Any, streams: torch.Tensor) -> torch.Tensor:
        """The trunk's logits [n, V] of streams [n, G * C]."""
        return trunk.lm_head(self.hyper_connection_mixer(streams))


class BlockDrafter:
    """DFlash and DFlash 2 by their formulas; a mapping of weights under published names.

    A context row is seen from the block's first row on: k >= base - (window - 1).
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        self.flash = config["dflash_config"]
        self.rows = config.get("block_size") or self.flash["block_size"]
        self.has_convs = "conv_kernel_size" in self.flash

    @staticmethod
    def shapes(config: dict[str, Any]) -> dict[str, list[int]]:
        """Every tensor of a checkpoint."""
        flash, width = config["dflash_config"], config["hidden_size"]
        D, inner = config["head_dim"], config["intermediate_size"]
        queries = config["num_attention_heads"] * D
        keys = config["num_key_value_heads"] * D
        shapes = {
            "fc.weight": [width, width * len(flash["target_layer_ids"])],
            "hidden_norm.weight": [width],
            "norm.weight": [width],
        }
        for i in range(config["num_hidden_layers"]):
            layer = {
                "input_layernorm.weight": [width],
                "post_attention_layernorm.weight": [width],
                "self_attn.q_proj.weight": [queries, width],
                "self_attn.k_proj.weight": [keys, width],
                "self_attn.v_proj.weight": [keys, width],
                "self_attn.o_proj.weight": [width, queries],
                "self_attn.q_norm.weight": [D],
                "self_attn.k_norm.weight": [D],
                "mlp.gate_proj.weight": [inner, width],
                "mlp.up_proj.weight": [inner, width],
                "mlp.down_proj.weight": [width, inner],
            }
            if "conv_kernel_size" in flash:
                taps, groups = flash["conv_kernel_size"], width // flash["conv_group_size"]
                for part in ("attention_conv", "mlp_conv"):
                    layer[f"{part}.base_kernel"] = [2, taps, width]
                    layer[f"{part}.kernel_projection.weight"] = [2 * taps * groups, width]
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        if "selector_rank" in flash:
            rank, prefix = flash["selector_rank"], "candidate_selector."
            shapes[prefix + "predecessor_codebook"] = [config["vocab_size"], rank]
            shapes[prefix + "successor_codebook"] = [config["vocab_size"], rank]
            shapes[prefix + "hidden_projection.weight"] = [rank, width]
        return shapes

    def context(self, aux: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [Hkv, n, D] of every layer for the rows at positions 0 .. n - 1."""
        rows = self._norm(aux @ self.weights["fc.weight"].T, "hidden_norm")
        positions = torch.arange(len(aux))
        layers = range(self.config["num_hidden_layers"])
        return [self._keys_and_values(i, rows, positions) for i in layers]

    def block(
        self, embedded: torch.Tensor, context: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Normed rows [R, C] of a block that stands behind the context."""
        x, base = embedded, context[0][0].shape[1]
        for i, rows in enumerate(context):
            for part, norm in (
                ("attention", "input_layernorm"),
                ("mlp", "post_attention_layernorm"),
            ):
                n = self._norm(x, f"layers.{i}.{norm}")
                before, after = self._convs(n, f"layers.{i}.{part}_conv")
                u = before(n)
                y = self._attend(i, u, rows, base) if part == "attention" else self._mlp(i, u)
                x = x + after(y)
        return self._norm(x, "norm")

    def select(self, hidden: torch.Tensor, logits: torch.Tensor, anchor: int) -> list[int]:
        """Proposals of a block's rows behind the anchor's."""
        if "selector_rank" not in self.flash:
            return [int(row.argmax()) for row in logits[1:]]
        prefix, chosen, previous = "candidate_selector.", [], anchor
        projected = hidden @ self.weights[prefix + "hidden_projection.weight"].T
        for row in range(1, len(hidden)):
            unary, candidates = logits[row].topk(self.flash["selector_top_k"])
            product = self.weights[prefix + "predecessor_codebook"][previous] * projected[row]
            pairs = self.weights[prefix + "successor_codebook"][candidates] @ product
            previous = int(candidates[(unary + pairs).argmax()])
            chosen.append(previous)
        return chosen

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(square + self.config["rms_norm_eps"])
        return scaled * self.weights[f"{name}.weight"]

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        D = x.shape[-1]
        exponents = torch.arange(0, D, 2).float() / D
        angles = positions[:, None].float() * self.config["rope_theta"] ** -exponents
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _keys_and_values(
        self, i: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prefix, D = f"layers.{i}.self_attn.", self.config["head_dim"]
        k = (x @ self.weights[prefix + "k_proj.weight"].T).view(len(x), -1, D)
        v = (x @ self.weights[prefix + "v_proj.weight"].T).view(len(x), -1, D)
        keys = self._rope(self._norm(k, prefix + "k_norm").transpose(0, 1), positions)
        return keys, v.transpose(0, 1)

    def _convs(self, n: torch.Tensor, name: str) -> tuple[Any, Any]:
        if not self.has_convs:
            return (lambda x: x), (lambda x: x)
        taps, size = self.flash["conv_kernel_size"], self.flash["conv_group_size"]
        deltas = n @ self.weights[f"{name}.kernel_projection.weight"].T
        deltas = deltas.view(len(n), 2, taps, -1).repeat_interleave(size, -1)
        kernels = self.weights[f"{name}.base_kernel"] + deltas  # [R, 2, taps, C]

        def side(which: int) -> Any:
            def conv(x: torch.Tensor) -> torch.Tensor:
                padded = functional.pad(x, (0, 0, taps - 1, 0))
                shifted = [padded[taps - 1 - t : taps - 1 - t + len(x)] for t in range(taps)]
                return sum(kernels[:, which, t] * shifted[t] for t in range(taps))

            return conv

        return side(0), side(1)

    def _attend(
        self, i: int, u: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], base: int
    ) -> torch.Tensor:
        prefix, D = f"layers.{i}.self_attn.", self.config["head_dim"]
        slides = self.config["layer_types"][i] == "sliding_attention"
        positions = torch.arange(base, base + len(u))
        q = (u @ self.weights[prefix + "q_proj.weight"].T).view(len(u), -1, D)
        q = self._rope(self._norm(q, prefix + "q_norm").transpose(0, 1), positions)
        start = max(0, base - self.config["sliding_window"] + 1) if slides else 0
        own = self._keys_and_values(i, u, positions)
        k, v = (torch.cat([old[:, start:], new], 1) for old, new in zip(rows, own, strict=True))
        groups = len(q) // len(k)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(D)
        if slides and not self.has_convs:  # the first DFlash is causal where it slides
            keys = torch.arange(start, base + len(u))
            scores = scores.masked_fill(keys > positions[:, None], float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(u), -1)
        return out @ self.weights[prefix + "o_proj.weight"].T

    def _mlp(self, i: int, u: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{i}.mlp."
        gate = functional.silu(u @ self.weights[prefix + "gate_proj.weight"].T)
        return (gate * (u @ self.weights[prefix + "up_proj.weight"].T)) @ self.weights[
            prefix + "down_proj.weight"
        ].T

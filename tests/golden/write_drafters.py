"""Write the drafters' golden fixtures: what torch computes for the tiny checkpoints.

Run it from an environment of its own, `pip install torch transformers`, then

    python tests/golden/write_drafters.py [NAME ...]

A fixture is two files in `drafters/`. NAME.json holds shapes and the sha256 of the weights, which
`drafter_recipes.py` draws again; NAME.npz what goes in and what must come out, float32.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from drafter_recipes import (
    ACCEPTED,
    ASSISTANT,
    BLOCKS,
    CHAIN,
    HEADS,
    PROMPT,
    SEED,
    VOCAB,
    draw_block_drafter,
    draw_trunk,
)
from recipes import RECIPES
from weights import draw_tokens, draw_weights, fingerprint

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import transformers
from torch_drafters import BlockDrafter, MTPHead, StreamsHead

FOLDER = Path(__file__).parent / "drafters"
TRUNK_SEED = 20  # of the fixture muse_glimmer


def build_trunk(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """A trunk and its head with unset weights."""
    moe = "num_experts" in arguments
    kind = "Qwen3_5Moe" if moe else "Qwen3_5"
    config = getattr(transformers, f"{kind}TextConfig")(**arguments)
    config._attn_implementation = "eager"
    trunk = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    folder = "qwen3_5_moe" if moe else "qwen3_5"
    module = getattr(getattr(transformers.models, folder), f"modeling_{folder}")
    layer, norm = getattr(module, f"{kind}DecoderLayer"), getattr(module, f"{kind}RMSNorm")
    return trunk, MTPHead(trunk, layer, norm).eval()


def fill(trunk: Any, head: Any) -> dict[str, np.ndarray]:
    """Draw and set the weights of both; they are returned under published names."""
    floats = {key for key, value in trunk.state_dict().items() if value.is_floating_point()}
    names = {published(name): (trunk, name) for name in floats}
    names |= {f"mtp.{name}": (head, name) for name in head.state_dict()}
    shapes = {key: list(module.state_dict()[name].shape) for key, (module, name) in names.items()}
    weights = draw_trunk(shapes)
    for module in (trunk, head):
        tensors = {
            name: torch.from_numpy(weights[key].copy())
            for key, (owner, name) in names.items()
            if owner is module
        }
        missing, unexpected = module.load_state_dict(tensors, strict=False)
        faults = [*unexpected, *(floats & set(missing))]
        assert not faults, faults
    return weights


def published(name: str) -> str:
    return "model.language_model." + name[6:] if name.startswith("model.") else name


def run_trunk(trunk: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The final norm's rows [T, C], and the stream behind every layer."""
    streams: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda *call: streams.append(_first(call[2])[0]))
        for layer in trunk.model.layers
    ]
    hidden = trunk.model(ids[None], use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return hidden, streams


def _first(output: Any) -> torch.Tensor:
    return output if torch.is_tensor(output) else output[0]


def write_head(name: str, arguments: dict[str, Any]) -> None:
    trunk, head = build_trunk(arguments)
    weights = fill(trunk, head)
    ids = torch.from_numpy(draw_tokens(PROMPT, VOCAB - 1, SEED).astype(np.int64))
    hidden, _ = run_trunk(trunk, ids)
    anchor = trunk.lm_head(hidden[-1]).argmax()
    following = torch.cat([ids[1:], anchor[None]])
    batch = head(trunk, following[None], hidden[None], None, 0)[0]
    cache = transformers.DynamicCache(config=head.config)
    steps = [
        head(trunk, following[None, i : i + 1], hidden[None, i : i + 1], cache, i)[0, 0]
        for i in range(PROMPT)
    ]
    chained, tokens = [steps[-1]], list[int]()
    for i in range(CHAIN):
        tokens.append(int(trunk.lm_head(chained[-1]).argmax()))
        token = torch.tensor([[tokens[-1]]])
        chained.append(head(trunk, token, chained[-1][None, None], cache, PROMPT + i)[0, 0])
    logits = trunk.lm_head(torch.stack(chained))
    top = logits.topk(2).values
    save(
        name,
        weights,
        {"config": arguments | {"model_type": name.removesuffix("_mtp")}},
        ids=ids,
        hidden=hidden,
        anchor=anchor,
        batch=batch,
        stepwise=torch.stack(steps),
        chain_tokens=torch.tensor(tokens),
        chain_hidden=torch.stack(chained),
        chain_logits=logits,
    )
    apart = (torch.stack(steps) - batch).abs().max()
    print(f"{name:16} batch to steps {apart:.1e}  margin {(top[:, 0] - top[:, 1]).min():.3f}")


def write_streams_head(name: str, arguments: dict[str, Any]) -> None:
    """A head over several streams, which are the trunk's before their last mixture."""
    config = transformers.Qwen4ExpTextConfig(**arguments)
    config._attn_implementation = "eager"
    trunk = transformers.Qwen4ExpForCausalLM(config).eval()
    module = transformers.models.qwen4_exp.modeling_qwen4_exp
    head = StreamsHead(
        trunk,
        module.Qwen4ExpTextDecoderLayer,
        module.Qwen4ExpTextGatedResidual,
        module.Qwen4ExpTextRMSNorm,
    ).eval()
    weights = fill(trunk, head)
    ids = torch.from_numpy(draw_tokens(PROMPT, VOCAB - 1, SEED).astype(np.int64))
    found: list[torch.Tensor] = []
    hook = trunk.model.hyper_connection_mixer.register_forward_pre_hook(
        lambda _, given: found.append(given[0][0])
    )
    last = trunk(ids[None], use_cache=False).logits[0, -1]
    hook.remove()
    hidden, following = found[0], torch.cat([ids[1:], last.argmax()[None]])
    batch = head(trunk, following, hidden)
    steps = [head(trunk, following[:n], hidden[:n])[-1] for n in range(1, PROMPT + 1)]
    rows, behind, tokens = hidden, following, list[int]()
    chained = [batch[-1]]
    for _ in range(CHAIN):
        tokens.append(int(head.logits(trunk, chained[-1][None]).argmax()))
        rows = torch.cat([rows, chained[-1][None]])
        behind = torch.cat([behind, torch.tensor(tokens[-1:])])
        chained.append(head(trunk, behind, rows)[-1])
    logits = head.logits(trunk, torch.stack(chained))
    top = logits.topk(2).values
    save(
        name,
        weights,
        {"config": arguments | {"model_type": name.removesuffix("_mtp")}},
        ids=ids,
        hidden=hidden,
        anchor=last.argmax(),
        batch=batch,
        stepwise=torch.stack(steps),
        chain_tokens=torch.tensor(tokens),
        chain_hidden=torch.stack(chained),
        chain_logits=logits,
    )
    apart = (torch.stack(steps) - batch).abs().max()
    print(f"{name:16} batch to steps {apart:.1e}  margin {(top[:, 0] - top[:, 1]).min():.3f}")


def write_block_drafter(name: str, config: dict[str, Any]) -> None:
    trunk, head = build_trunk(HEADS["qwen3_5_mtp"])
    fill(trunk, head)
    weights = draw_block_drafter(BlockDrafter.shapes(config))
    drafter = BlockDrafter(config, {k: torch.from_numpy(v) for k, v in weights.items()})
    ids = torch.from_numpy(draw_tokens(PROMPT, VOCAB - 1, SEED).astype(np.int64))
    arrays: dict[str, Any] = {"ids": ids}
    for turn in (1, 2):
        hidden, streams = run_trunk(trunk, ids)
        aux = torch.cat([streams[i] for i in drafter.flash["target_layer_ids"]], -1)
        anchor = trunk.lm_head(hidden[-1]).argmax()
        masks = [drafter.flash["mask_token_id"]] * (drafter.rows - 1)
        embedded = trunk.model.embed_tokens(torch.tensor([int(anchor), *masks]))
        context = drafter.context(aux)
        rows = drafter.block(embedded, context)
        logits = trunk.lm_head(rows)
        proposals = drafter.select(rows, logits, int(anchor))
        arrays |= {
            f"ids{turn}": ids,
            f"aux{turn}": aux,
            f"anchor{turn}": anchor,
            f"hidden{turn}": rows,
            f"logits{turn}": logits,
            f"proposals{turn}": torch.tensor(proposals),
        }
        if turn == 1:
            for i, (k, v) in enumerate(context):
                arrays |= {f"k{i}": k.transpose(0, 1), f"v{i}": v.transpose(0, 1)}
        ids = torch.cat([ids, anchor[None], torch.tensor(proposals[:ACCEPTED])])
    plain = [int(row.argmax()) for row in arrays["logits1"][1:]]
    anchored = [
        drafter.select(arrays["hidden1"][[0, i]], arrays["logits1"][[0, i]], int(arrays["anchor1"]))
        for i in range(1, drafter.rows)
    ]
    save(name, weights, {"config": config}, **arrays)
    print(f"{name:16} proposals {arrays['proposals1'].tolist()}, by argmax {plain}, ", end="")
    print(f"from the anchor {[one for (one,) in anchored]}")


def write_assistant() -> None:
    """transformers' own drafter of muse_glimmer, over the trunk of that fixture."""
    recipe = RECIPES["muse_glimmer"]
    trunk = transformers.MuseGlimmerForConditionalGeneration(
        transformers.MuseGlimmerConfig(**recipe.arguments, attn_implementation="eager")
    ).eval()
    shapes = {key: list(value.shape) for key, value in trunk.state_dict().items()}
    drawn = draw_weights(shapes, TRUNK_SEED, **recipe.settings)
    trunk.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in drawn.items()})
    config = transformers.MuseGlimmerAssistantConfig(**ASSISTANT, attn_implementation="eager")
    drafter = transformers.MuseGlimmerAssistantModel(config).eval()
    weights = draw_block_drafter({k: list(v.shape) for k, v in drafter.state_dict().items()})
    drafter.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in weights.items()})
    cache = transformers.cache_utils.DFlashCache(config=config)
    cache.activate_past_recording()
    ids, past, rows = torch.from_numpy(draw_tokens(PROMPT, 316, SEED).astype(np.int64)), 0, 7
    arrays: dict[str, Any] = {}
    for turn in (1, 2):
        out = trunk(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        aux = torch.cat([out.hidden_states[i + 1][0] for i in config.target_layer_ids], -1)
        anchor = out.logits[0, -1].argmax()
        block = torch.tensor([int(anchor), *[config.mask_token_id] * (rows - 1)])
        table = trunk.get_input_embeddings().weight
        cache.set_previous_accepted_tokens(len(ids) - past)
        if turn == 2:
            cache.crop(-rows)
        hidden = drafter(
            noise_embeds=table[block][None],
            context_hidden_states=aux[past:][None],
            position_ids=torch.arange(past, len(ids) + rows)[None],
            cache=cache,
        ).last_hidden_state[0]
        logits = trunk.lm_head(hidden)
        proposals = logits[1:].argmax(-1)
        arrays |= {
            f"ids{turn}": ids,
            f"aux{turn}": aux,
            f"anchor{turn}": anchor,
            f"hidden{turn}": hidden,
            f"logits{turn}": logits,
            f"proposals{turn}": proposals,
        }
        past, ids = len(ids), torch.cat([ids, anchor[None], proposals[:ACCEPTED]])
    saved = {"model_type": "muse_glimmer_assistant", **ASSISTANT}
    save("muse_assistant", weights, {"config": saved}, **arrays)
    print(f"muse_assistant   proposals {arrays['proposals1'].tolist()}")


def save(
    name: str, weights: dict[str, np.ndarray], facts: dict[str, Any], **arrays: torch.Tensor
) -> None:
    FOLDER.mkdir(exist_ok=True)
    shapes = {key: list(value.shape) for key, value in weights.items()}
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(shapes.items()))
    head = json.dumps({"sha256": fingerprint(weights), **facts}, indent=1)[:-2]
    (FOLDER / f"{name}.json").write_text(f'{head},\n "shapes": {{\n{lines}\n }}\n}}\n')
    values = {
        key: value.numpy().astype(np.float32 if value.is_floating_point() else np.int32)
        for key, value in arrays.items()
    }
    np.savez_compressed(FOLDER / f"{name}.npz", **values)


if __name__ == "__main__":
    wanted = sys.argv[1:] or [*HEADS, *BLOCKS, "muse_assistant"]
    with torch.no_grad():
        for each in wanted:
            if each == "qwen4_exp_mtp":
                write_streams_head(each, HEADS[each])
            elif each in HEADS:
                write_head(each, HEADS[each])
            elif each == "muse_assistant":
                write_assistant()
            else:
                write_block_drafter(each, BLOCKS[each])

"""Write the golden fixtures: what transformers computes for the recipes' tiny checkpoints.

Spark 2.5, which transformers has not, is `torch_spark.py`.

Run it from an environment of its own, `pip install torch transformers`, then

    python tests/golden/write_golden.py [NAME ...]

A fixture is two files. NAME.json holds the configuration in both spellings, the shapes and the
sha256 of the weights (which `weights.py` draws again), and how far transformers' own cached run
is from its full pass. NAME.npz holds tokens [T] and float32 logits: every fifth column of every
position and the whole last row, of the float weights and of their INT4 form, dequantized. Where a
recipe asks for it, `stream` [L + 1, rows, C] is what the float model's layers hand on.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from recipes import PROMPT, RECIPES, TOKENS, Recipe
from weights import (
    dequantize,
    dequantize_mxfp4,
    draw_tokens,
    draw_weights,
    fingerprint,
    int4_layout,
    quantize,
    quantize_mxfp4,
)

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import torch_spark
import transformers

SEED = 20
COLUMN_STEP = 5


def write_fixture(name: str, recipe: Recipe) -> None:
    config = _configure(recipe, recipe.arguments)
    saved = json.loads(config.to_json_string())
    model = _model(recipe, config)
    shapes = {key: list(value.shape) for key, value in _own_tensors(model).items()}
    weights = draw_weights(shapes, SEED, **recipe.settings)
    _fill(model, weights)
    tokens = draw_tokens(TOKENS, 320, SEED)
    full = _full_pass(model, tokens)
    extra = {"stream": _stream(model, tokens[: recipe.stream_rows])} if recipe.stream_rows else {}
    older = json.loads(json.dumps(saved))
    recipe.older(older)
    _check_spelling(recipe, older, weights, tokens, full)

    _fill(model, {key: _rounded(key, value, recipe) for key, value in weights.items()})
    int4 = _full_pass(model, tokens)
    cached = _stepwise(model, tokens)
    difference = None if cached is None else float(np.abs(cached - int4).max())
    folder = Path(__file__).parent
    description = {
        "model_class": recipe.model,
        "transformers": transformers.__version__,
        "seed": SEED,
        "settings": recipe.settings,
        "mxfp4": recipe.mxfp4,
        "sha256": fingerprint(weights),
        "stepwise_difference": difference,
        "logit_deviation": float(full.std()),
        "config": _trimmed(older),
        "config_v5": _trimmed(saved),
        "shapes": shapes,
    }
    (folder / f"{name}.json").write_text(_dump(description))
    np.savez_compressed(
        folder / f"{name}.npz",
        tokens=tokens,
        full=full[:, ::COLUMN_STEP],
        full_last=full[-1],
        int4=int4[:, ::COLUMN_STEP],
        int4_last=int4[-1],
        **extra,
    )
    print(
        f"{name:20} std {full.std():6.2f}  stepwise {difference or 0.0:.1e}"
        f"  int4 moves logits by {np.abs(int4 - full).max():.2f}"
    )


def _configure(recipe: Recipe, arguments: dict[str, Any]) -> Any:
    arguments = dict(json.loads(json.dumps(arguments)))
    kind = _named(recipe.config)
    if recipe.config == "Gemma4Config" and isinstance(arguments["text_config"], dict):
        text = {k: v for k, v in arguments["text_config"].items() if k != "model_type"}
        arguments["text_config"] = transformers.Gemma4TextConfig(**text)
    config = kind(**arguments)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            part._attn_implementation = "eager"
    return config


def _model(recipe: Recipe, config: Any) -> Any:
    return _named(recipe.model)(config).eval().to(torch.float32)


def _named(name: str) -> Any:
    """A class of transformers, or one for a family that transformers has not."""
    return getattr(torch_spark if name.startswith("Spark") else transformers, name)


def _own_tensors(model: Any) -> dict[str, Any]:
    """The tensors that a checkpoint holds but numbers: a tied head is not among them."""
    tensors = {key: value for key, value in model.state_dict().items() if value.is_floating_point()}
    if model.config.get_text_config().tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return tensors


def _fill(model: Any, weights: dict[str, np.ndarray]) -> None:
    tensors = {key: torch.from_numpy(value.copy()) for key, value in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    numbers = {key for key, value in model.state_dict().items() if not value.is_floating_point()}
    assert set(missing) <= {"lm_head.weight"} | numbers, missing
    model.tie_weights()


def _rounded(name: str, weight: np.ndarray, recipe: Recipe) -> np.ndarray:
    if recipe.mxfp4 and weight.ndim == 3:
        return dequantize_mxfp4(*quantize_mxfp4(weight.swapaxes(1, 2))).swapaxes(1, 2)
    layout = int4_layout(name, weight.shape)
    if layout is None:
        return weight
    bits, group_size = layout
    return dequantize(*quantize(weight, bits, group_size), bits)


def _full_pass(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return model(input_ids=ids, use_cache=False).logits[0].float().numpy()


def _stream(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.stack([state[0] for state in states]).float().numpy()


def _stepwise(model: Any, tokens: np.ndarray) -> np.ndarray | None:
    """transformers' own cached run; families that it has not have none."""
    if type(model).__module__ == torch_spark.__name__:
        return None
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    rows, cache = [], None
    key = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        for start, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, len(tokens)))]:
            out = model(input_ids=ids[:, start:end], use_cache=True, **{key: cache})
            cache = getattr(out, key)
            rows.append(out.logits[0].float().numpy())
    return np.concatenate(rows)


def _check_spelling(
    recipe: Recipe,
    older: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    full: np.ndarray,
) -> None:
    """The older spelling of a configuration must mean the same to transformers."""
    again = _model(recipe, _configure(recipe, older))
    _fill(again, weights)
    difference = np.abs(_full_pass(again, tokens) - full).max()
    assert difference == 0, f"the older spelling changes logits by {difference}"


def _trimmed(config: dict[str, Any]) -> dict[str, Any]:
    """Drop what describes transformers rather than the model."""
    strangers = {
        "transformers_version",
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
    }
    kept = {k: v for k, v in config.items() if k not in strangers}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = _trimmed(kept["text_config"])
    return kept


def _dump(description: dict[str, Any]) -> str:
    """Readable JSON with one line a shape."""
    shapes = description.pop("shapes")
    head = json.dumps(description, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in shapes.items())
    return f'{head},\n "shapes": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RECIPES:
        write_fixture(wanted, RECIPES[wanted])

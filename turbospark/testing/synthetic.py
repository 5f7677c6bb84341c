"""Small checkpoints with all the files of a published one, for tests, benchmarks and users' CI."""

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn

from turbospark.errors import OptionError, UnsupportedError
from turbospark.loading.convert import quantization_entries
from turbospark.loading.install import Slot, parameter_slots
from turbospark.loading.quantize import parse_quantize, require_divisible
from turbospark.registry import resolve_family
from turbospark.testing.checkpoint import write_texts
from turbospark.testing.drawn import write_drawn_weights
from turbospark.testing.sizes import KINDS, sizes_of
from turbospark.testing.vocabulary import LEAST_IDS, MARKS

_BESIDE_MODEL = {"bos_token_id", "eos_token_id", "architectures", "dtype", "torch_dtype"}


def synthetic(
    folder: str | os.PathLike[str],
    kind: str | None = None,
    *,
    model_type: str | None = None,
    quantize: str | None = "int4",
    seed: int = 0,
    **config_values: Any,
) -> Path:
    """Write a small checkpoint of random weights: it loads in a moment and talks nonsense.

    It has what a published one has: config.json, model.safetensors, a tokenizer that decodes,
    generation_config.json and a chat template. The same arguments give the same bytes, on every
    machine.

    "streamed" is laid out for experts that are read one by one: those of each layer have a
    safetensors file of their own, beside the file of all else, and an index says which is which.
    A tensor has the experts one behind another, so that expert e of E is the bytes from
    `offset + e * nbytes / E` on. Of these files the data begin at a multiple of 4096 bytes, and so
    does every tensor at the sizes this kind has; at sizes set otherwise, one begins at a multiple
    of the largest power of two that divides its bytes, where that is below 4096. Nothing reads
    them so yet: it loads as any checkpoint does, with all experts in memory.

    Args:
        folder: made; it must not hold anything.
        kind: of the Gemma 4 family: "dense" (every layer attends to everything), "sliding" (two
            layers with a window to a full one), "moe" (8 routed experts too) or "streamed" (32 of
            them, most of all bytes, in files of their own); by default dense.
        model_type: in place of a kind, another registered family's.
        quantize: as for `load`: matrices are stored so; None stores bfloat16.
        seed: of the weights.
        config_values: go into config.json, in place of what would stand there; with
            `mtp_num_hidden_layers=1` the prediction head is written too, where there is one.

    Returns:
        the folder.

    Raises:
        OptionError: an argument is unknown, or the folder is in use; nothing was written.
        ConfigError: the family refuses the configuration; nothing was written.
    """
    wish = parse_quantize(quantize)
    if type(seed) is not int or seed < 0:
        raise OptionError(f"seed={seed!r} is not a whole number of 0 or more")
    path = Path(folder)
    _require_free(path)
    config = _configuration(kind, model_type, config_values)
    slots = _slots(config, config_values)
    if wish is not None:
        widths = (slot.shape[-1] for slot in slots.values() if slot.is_matrix)
        require_divisible(widths, wish, str(path))
    path.mkdir(parents=True, exist_ok=True)
    groups = _experts_apart(slots) if kind == "streamed" else [slots]
    layouts = write_drawn_weights(path, groups, wish, seed)
    if layouts:
        config["quantization"] = quantization_entries(layouts)
    write_texts(path, config)
    return path


def _require_free(path: Path) -> None:
    # A link that leads nowhere does not exist, but no folder can be made in its place.
    if (path.is_symlink() or path.exists()) and (not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"{path} is there already; choose another folder or remove it")


def _configuration(
    kind: str | None, model_type: str | None, config_values: Mapping[str, Any]
) -> dict[str, Any]:
    if kind is not None and model_type is not None:
        raise OptionError(
            f"kind={kind!r} is one of Gemma 4, and model_type={model_type!r} another family: give "
            "one of them"
        )
    kind = "dense" if kind is None else kind
    if model_type is None and kind not in KINDS:
        raise OptionError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    sizes = KINDS[kind] if model_type is None else sizes_of(str(model_type))
    config = {**sizes, **config_values}
    try:
        json.dumps(config_values)
    except (TypeError, ValueError) as error:
        raise OptionError(f"a value cannot be written to config.json: {error}") from error
    size = config["vocab_size"]
    if type(size) is not int or size < LEAST_IDS:
        raise OptionError(
            f"vocab_size={size!r}: every byte and {len(MARKS)} marks need {LEAST_IDS} ids or more"
        )
    return config


def _slots(config: Mapping[str, Any], config_values: Mapping[str, Any]) -> dict[str, Slot]:
    """Parameters of the family's model, and of the prediction head that the values announce.

    Values that the family has not looked at are refused.
    """
    noted = _Noted(config)
    try:
        family = resolve_family(config["model_type"])
    except UnsupportedError as error:
        raise OptionError(f"model_type: {error}") from error
    model = cast("nn.Module", family.build(noted))
    for name in config_values:
        if name not in noted.read | _BESIDE_MODEL:
            near = difflib.get_close_matches(name, sorted(noted.read), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"the family {family.name!r} does not know {name!r}{hint}")
    slots = parameter_slots(model)
    if config.get("mtp_num_hidden_layers") and "mtp" in family.drafters:
        head = cast("nn.Module", family.drafters["mtp"](config, model))
        slots |= {f"mtp.{name}": slot for name, slot in parameter_slots(head).items()}
    return slots


def _experts_apart(slots: Mapping[str, Slot]) -> list[dict[str, Slot]]:
    """All else first, then the experts of each layer in their order."""
    groups: dict[str, dict[str, Slot]] = {"": {}}
    for name, slot in slots.items():
        layer, experts, _ = name.partition(".experts.")
        groups.setdefault(layer if experts else "", {})[name] = slot
    return [groups[layer] for layer in sorted(groups, key=lambda name: (len(name), name))]


class _Noted(Mapping[str, Any]):
    """A configuration that notes which of its fields were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read = {"model_type"}

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

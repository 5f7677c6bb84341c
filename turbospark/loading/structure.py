"""What a model is made of, as its family builds it: layers, kinds of tensors, caches."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.nn as nn

from turbospark.caches.latent import LatentCache
from turbospark.caches.ring import RingCache
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading.install import Slot, parameter_slots
from turbospark.loading.plan import LONGEST_CONTEXT, RING_SLACK, session_bytes
from turbospark.loading.planned import megabytes
from turbospark.loading.safetensors import DTYPES
from turbospark.nn.moe import expert_shares
from turbospark.nn.ngram_table import table_shares
from turbospark.protocols import CausalModel

CLASSES = (
    ("norms", r"norm\w*\.weight$"),
    ("head", r"^lm_head\."),
    ("embedding", r"\bembed_tokens"),
    ("experts", r"\.experts\."),
    ("router", r"\brouter\.|\.mlp\.gate\.|\.shared_expert_gate\."),
    ("attention", r"\.self_attn\."),
    ("delta net", r"\.linear_attn\."),
    ("mlp", r"\.mlp\."),
    ("n-grams", r"\.ple\."),
    ("hyper", r"hyper_connection"),
    ("other", r""),
)
"""Kinds of tensors by the model's own names; the first that matches counts."""

SHORT_TYPES = {dtype: name for name, dtype in DTYPES.items()}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)")
_UNDECIDED = 8192


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike: what mixes their rows, and what each row then goes through."""

    count: int
    mixer: str
    mlp: str


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors of one kind.

    Attributes:
        name: the kind.
        count: of tensors.
        parameters: numbers they stand for.
        nbytes: of the tensors as they are stored; 0 where there are no weights.
        layouts: how they are stored, in words, to how many are.
    """

    name: str
    count: int
    parameters: int
    nbytes: int
    layouts: Mapping[str, int]

    def __str__(self) -> str:
        layouts = ", ".join(f"{count} x {name}" for name, count in self.layouts.items())
        stored = f", {megabytes(self.nbytes)}: {layouts}" if layouts else ""
        return f"{self.parameters:,} in {self.count} tensor{'s' * (self.count > 1)}{stored}"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Caches of one kind, and what they take in one session of the context's length."""

    count: int
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Structure:
    """What a model is made of.

    Attributes:
        context: tokens that `caches` are counted for.
        parameters: of the model, a tied head counted once.
        active_parameters: those that one token needs: of routed experts, the few it is sent to.
    """

    layers: tuple[LayerGroup, ...]
    tensors: tuple[TensorClass, ...]
    caches: tuple[CacheGroup, ...]
    context: int
    parameters: int
    active_parameters: int

    @property
    def session_bytes(self) -> int:
        """Bytes of one session's caches at the whole context."""
        return sum(group.nbytes for group in self.caches)

    def rows(self) -> list[tuple[str, str]]:
        """It as lines of a title and a text."""
        active = self.active_parameters
        note = "" if active == self.parameters else f", {active:,} active"
        caches = ", ".join(
            f"{megabytes(group.nbytes)} in {group.count} x {group.kind}" for group in self.caches
        )
        return [
            ("parameters", f"{self.parameters:,}{note}"),
            *(("layers", f"{each.count} x {each.mixer}; {each.mlp}") for each in self.layers),
            *((each.name, str(each)) for each in self.tensors),
            ("session", f"{megabytes(self.session_bytes)} at {self.context} tokens: {caches}"),
        ]


def structure(
    model: CausalModel,
    config: Mapping[str, Any],
    weights: Mapping[str, Weight] | None,
    context: int | None = None,
) -> Structure:
    """Describe a model with unset weights.

    Args:
        model: as its family built it.
        config: normalised.
        weights: the model's own names to what is stored, or to stand-ins; None where nothing is.
        context: tokens of a session; by default the trained length.
    """
    module = cast("nn.Module", model)
    slots = parameter_slots(module)
    of_experts = expert_shares(module)
    shares = of_experts | table_shares(module)
    counts = {name: math.prod(slot.shape) for name, slot in slots.items()}
    tokens = context or min(model.max_position or _UNDECIDED, LONGEST_CONTEXT)
    return Structure(
        layers=_layers(model, slots, of_experts, config),
        tensors=_classes(counts, weights or {}),
        caches=_caches(model, tokens),
        context=tokens,
        parameters=sum(counts.values()),
        active_parameters=round(sum(n * shares.get(name, 1.0) for name, n in counts.items())),
    )


def layout_of(weight: Weight) -> str:
    """How a tensor is stored, in words."""
    if not isinstance(weight, QuantizedWeight):
        return SHORT_TYPES.get(weight.dtype, str(weight.dtype))
    if weight.mode == "mxfp4":
        return "mxfp4"
    return f"{weight.bits} bits, groups of {weight.group_size}"


def class_of(name: str) -> str:
    """The kind of a parameter, by the model's own name of it."""
    return next(kind for kind, pattern in CLASSES if re.search(pattern, name))


def _classes(counts: Mapping[str, int], weights: Mapping[str, Weight]) -> tuple[TensorClass, ...]:
    found: list[TensorClass] = []
    for kind, _ in CLASSES:
        names = [name for name in counts if class_of(name) == kind]
        stored = [weights[name] for name in names if name in weights]
        layouts = Counter(map(layout_of, stored))
        if names:
            total = sum(counts[name] for name in names)
            nbytes = sum(weight.nbytes for weight in stored)
            found.append(TensorClass(kind, len(names), total, nbytes, dict(layouts.most_common())))
    return tuple(found)


def _caches(model: CausalModel, context: int) -> tuple[CacheGroup, ...]:
    groups: dict[str, list[Any]] = {}
    for cache in model.make_caches(context, RING_SLACK):
        groups.setdefault(_cache_kind(cache), []).append(cache)
    return tuple(
        CacheGroup(len(caches), kind, session_bytes(caches, context))
        for kind, caches in groups.items()
    )


def _cache_kind(cache: Any) -> str:
    if cache.recurrent:
        return "recurrent state"
    if isinstance(cache, RingCache):
        return f"rows of a window of {cache.window}"
    return "latent rows" if isinstance(cache, LatentCache) else "rows of all tokens"


def _layers(
    model: CausalModel,
    slots: Mapping[str, Slot],
    shares: Mapping[str, float],
    config: Mapping[str, Any],
) -> tuple[LayerGroup, ...]:
    inside: dict[int, dict[str, tuple[int, ...]]] = {}
    used: dict[int, float] = {}
    for name, slot in slots.items():
        match = _LAYER.search(name)
        if match:
            index = int(match[1])
            inside.setdefault(index, {})[match[2]] = slot.shape
            used[index] = min(used.get(index, 1.0), shares.get(name, 1.0))
    mixers = _Mixers(model.make_caches(1, 0), int(config.get("num_attention_heads") or 0))
    kinds = Counter(
        (mixers.next(shapes), _mlp(shapes, used[index])) for index, shapes in sorted(inside.items())
    )
    return tuple(LayerGroup(count, *kind) for kind, count in kinds.items())


class _Mixers:
    """What mixes the rows of each layer, in their order, by the caches that they write."""

    def __init__(self, caches: Sequence[Any], num_heads: int) -> None:
        self._heads = f"{num_heads} heads"
        self._states = (cache for cache in caches if cache.recurrent and cache.state[-1].ndim == 3)
        self._rows = (cache for cache in caches if not cache.recurrent)

    def next(self, shapes: Iterable[str]) -> str:
        """Of the next layer, whose parameters have these names."""
        kinds = {part for name in shapes for part in name.split(".")}
        ngrams = ", after n-grams" if "ple" in kinds else ""
        if "linear_attn" in kinds:
            count, *state = next(self._states).state[-1].shape
            return f"delta net, {count} states of {' x '.join(map(str, state))}{ngrams}"
        cache = next(self._rows, None)
        if cache is None:
            return "attention to an earlier layer's rows"
        if isinstance(cache, LatentCache):
            return f"latent attention, {self._heads}, rows of {cache.value_dim} + {cache.head_dim}"
        kind = "full"
        if "indexer" in kinds:
            kind, _ = "sparse", next(self._rows)
        elif isinstance(cache, RingCache):
            kind = f"window {cache.window}"
        return (
            f"{kind} attention, {self._heads} of {cache.head_dim}, {cache.num_kv_heads} of keys "
            f"and values{ngrams}"
        )


def _mlp(shapes: Mapping[str, tuple[int, ...]], share: float) -> str:
    parts: list[str] = []
    for name, shape in shapes.items():
        owner = name.removesuffix(".down_proj.weight")
        if owner == name:
            continue
        if len(shape) == 3:
            parts.append(f"{round(share * shape[0])} of {shape[0]} experts of {shape[-1]}")
        elif "shared_expert" in owner:
            parts.append(f"a shared expert of {shape[-1]}")
        else:
            parts.append(f"MLP of {shape[-1]}")
    return ", ".join(sorted(parts)) or "no MLP"

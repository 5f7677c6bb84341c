"""How much memory a model and its conversations will take, before anything is loaded."""

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from turbospark.caches.base import RowCache
from turbospark.errors import CheckpointError, OptionError
from turbospark.kernels.device import on_cpu
from turbospark.loading.drafter_modules import find_drafter
from turbospark.loading.install import Handling
from turbospark.loading.opened import read_tokenizer
from turbospark.loading.outline import Outline, held_sizes, outline
from turbospark.loading.planned import Plan
from turbospark.loading.quantize import parse_quantize
from turbospark.loading.source import Source, resolve_headers
from turbospark.nn.latent import LatentAttention
from turbospark.nn.moe import RoutedExperts
from turbospark.nn.unit import units_of
from turbospark.settings import PLAN_CONTEXT, PLAN_SESSIONS, RunnerConfig
from turbospark.speculation.model import ModelDrafter
from turbospark.speculation.tokenizers import check_draft_model

RING_SLACK = 128
CHUNK_ON_CPU = 256
CHUNK_ON_GPU = 2048
LONGEST_CONTEXT = 10_000_000


def plan(
    path_or_repo: str | os.PathLike[str],
    context: int = PLAN_CONTEXT,
    sessions: int = PLAN_SESSIONS,
    *,
    quantize: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    local_files_only: bool = False,
    config: RunnerConfig | None = None,
) -> Plan:
    """Work out the memory a model needs; its weights are neither downloaded nor read.

    Args:
        path_or_repo: as for `load`; the weights of a Hub id stay on the Hub.
        context: tokens of a session.
        sessions: sessions kept.
        quantize: as for `load`.
        revision: branch, tag or commit on the Hub.
        dequantize: as for `load`.
        local_files_only: plan what was downloaded before, and never ask the Hub.
        config: how the model is run, of which `PLANNED_OPTIONS` count; by default as usual. Of a
            drafter's Hub id the whole drafter is fetched.

    Raises:
        OptionError: the context is beyond `LONGEST_CONTEXT`, `quantize` is unknown, or there is
            no such drafter, or it reads other tokens.
        SourceError: no checkpoint is there.
        ConfigError: its configuration is damaged or not implemented.
        CheckpointError: its headers are damaged or not those of the configuration.
    """
    check_context(context)
    wish = parse_quantize(quantize)
    source = resolve_headers(path_or_repo, revision=revision, local_files_only=local_files_only)
    shape = outline(source, dequantize)
    caches = shape.causal.make_caches(context, RING_SLACK)
    handling = Handling.of(source, wish)
    held, active = shape.held_bytes(handling)
    config = config or RunnerConfig()
    drafter = _drafter_bytes(config.draft, shape, source, handling, context, local_files_only)
    return Plan(
        source=shape.path,
        model_type=str(shape.config.get("model_type", "")),
        num_tensors=shape.num_tensors,
        file_bytes=shape.file_bytes,
        weight_bytes=held,
        active_bytes=active,
        left_bytes=shape.left_bytes,
        context=context,
        sessions=sessions,
        session_bytes=session_bytes(caches, context),
        working_bytes=_working_bytes(shape, context),
        free_bytes=free_bytes(),
        state_bytes=state_bytes(caches),
        drafter_bytes=drafter.weights,
        drafter_session_bytes=drafter.session,
        checkpoint_bytes=_checkpoint_bytes(
            state_bytes(caches), drafter.state, context, config.checkpoint_bytes
        ),
    )


class _DrafterBytes(NamedTuple):
    """Of a drafter's weights, of its caches in one session, and of recurrent ones among these."""

    weights: int = 0
    session: int = 0
    state: int = 0


def _drafter_bytes(
    draft: str,
    shape: Outline,
    target: Source,
    handling: Handling,
    context: int,
    local_files_only: bool,
) -> _DrafterBytes:
    if draft in {"off", "ngram"}:
        return _DrafterBytes()
    found = find_drafter(
        draft, shape.config, shape.causal, target.path,
        arrays=shape.arrays, local_files_only=local_files_only,
    )  # fmt: skip
    if isinstance(found, str):
        return _DrafterBytes()
    if isinstance(found, Source):
        other = outline(found)
        own, theirs = read_tokenizer(target, shape.config), read_tokenizer(found, other.config)
        check_draft_model(own, theirs, other.causal.vocab_size, found.name)
        held = other.held_bytes(handling)[0]
        drafter = ModelDrafter(other.causal, shape.causal.vocab_size)
    else:
        try:
            held = sum(held_sizes(found.module, found.weights(), found.where, handling).values())
        except CheckpointError:
            if draft == "auto":  # loading goes without it
                return _DrafterBytes()
            raise
        drafter = found.drafter()
    caches = drafter.new_state(context).caches
    return _DrafterBytes(held, session_bytes(caches, context), state_bytes(caches))


def _checkpoint_bytes(state: int, drafter_state: int, context: int, budget: int) -> int:
    """What the states that one session keeps may take: no more than one a token of its text."""
    if not 0 < state <= budget:
        return 0
    return min(budget, min(budget // state, context) * (state + drafter_state))


def check_context(context: int) -> None:
    """Refuse a context beyond reason: its caches are stepped through chunk by chunk.

    Raises:
        OptionError: it is.
    """
    if context > LONGEST_CONTEXT:
        raise OptionError(f"context={context} is more than {LONGEST_CONTEXT}, the most it can be")


def session_bytes(caches: Sequence[Any], context: int) -> int:
    """Bytes of one session's caches after `context` tokens, as the caches themselves reserve them.

    Args:
        caches: empty ones, as `make_caches` gave them; some are advanced, none is evaluated.
        context: tokens fed, in chunks of the usual size.
    """
    rows = [cache for cache in caches if not cache.recurrent]
    counts = Counter(map(_likeness, rows))
    chunk, total = _chunk(), 0
    for kind, cache in {_likeness(cache): cache for cache in rows}.items():
        for done in range(0, context, chunk):
            count = min(chunk, context - done)
            cache.reserve(count)
            cache.advance(count)
        total += counts[kind] * cache.nbytes
    # `reserve` is the CPU's way in and takes float32; GPUs keep rows of two bytes a number.
    return state_bytes(caches) + (total if on_cpu() else total // 2)


def _likeness(cache: Any) -> Hashable:
    """What two caches of rows have in common that will always be of one size."""
    if not isinstance(cache, RowCache):
        return id(cache)
    return repr(cache), cache.num_kv_heads, cache.head_dim, cache.value_dim


def state_bytes(caches: Sequence[Any]) -> int:
    """Bytes of the states of recurrent layers: float32 on every device, at any length."""
    states = [cache.state for cache in caches if cache.recurrent]
    return sum(array.nbytes for state in states for array in state)


def free_bytes() -> int | None:
    """Memory that may be had now."""
    if mx.metal.is_available():
        limit = mx.device_info()["max_recommended_working_set_size"]
        return int(limit) - mx.get_active_memory()
    listing = Path("/proc/meminfo")
    if not listing.exists():
        return None
    for line in listing.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return None


def _chunk() -> int:
    return CHUNK_ON_CPU if on_cpu() else CHUNK_ON_GPU


def _working_bytes(shape: Outline, context: int) -> int:
    """Rows of a chunk in the widest layer, and two rows of logits, in float32."""
    config = shape.config
    hidden = int(config.get("hidden_size", 0)) * int(config.get("hc_count") or 1)
    heads = int(config.get("num_attention_heads", 0)) * int(config.get("head_dim") or 0)
    inner = int(config.get("intermediate_size", 0))
    for cache in shape.causal.make_caches(1, 0):
        if cache.recurrent:  # its filter is as wide as all its heads
            inner = max(inner, cache.state[0].shape[-1])
    for _, unit in units_of(shape.model):
        if isinstance(unit, RoutedExperts):
            inner = max(inner, unit.width)
        elif isinstance(unit, LatentAttention):  # its queries are as wide as the cached rows
            heads = max(heads, unit.geometry.num_heads * unit.geometry.row_dim)
    rows = min(_chunk(), context)
    return 4 * (rows * (3 * hidden + 2 * max(inner, heads)) + 2 * shape.causal.vocab_size)

"""How much memory a model and its conversations will take, before anything is loaded."""

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from turbospark.caches.base import RowCache
from turbospark.errors import CheckpointError, OptionError
from turbospark.kernels.device import on_cpu
from turbospark.loading.drafter_modules import find_drafter
from turbospark.loading.install import Handling
from turbospark.loading.outline import Outline, held_sizes, outline
from turbospark.loading.quantize import parse_quantize
from turbospark.loading.source import Source, resolve_headers
from turbospark.nn.latent import LatentAttention
from turbospark.nn.moe import RoutedExperts
from turbospark.nn.unit import units_of
from turbospark.settings import PLAN_CONTEXT, PLAN_SESSIONS
from turbospark.speculation.model import ModelDrafter

RING_SLACK = 128
CHUNK_ON_CPU = 256
CHUNK_ON_GPU = 2048
LONGEST_CONTEXT = 10_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of a model's memory.

    Attributes:
        source: folder, file or Hub id.
        model_type: its family.
        num_tensors: tensors in the files.
        file_bytes: bytes of the tensors in the files.
        weight_bytes: bytes of the weights once loaded; exact.
        active_bytes: those of them that one token needs: of routed experts, the few it is sent to.
        left_bytes: bytes of tables that stay in the files, of which a token reads a few rows.
        drafter_bytes: bytes of a drafter's weights once loaded; exact.
        drafter_session_bytes: bytes of its caches in one session of `context` tokens; exact.
        context: tokens of a session.
        sessions: sessions kept.
        session_bytes: bytes of one session's caches at `context` tokens; exact.
        state_bytes: those of them that recurrent layers take at any length; exact.
        working_bytes: activations of the largest prefill chunk and the logits; an estimate.
        free_bytes: memory that may be had now, or None where the machine does not say.
    """

    source: str
    model_type: str
    num_tensors: int
    file_bytes: int
    weight_bytes: int
    context: int
    sessions: int
    session_bytes: int
    working_bytes: int
    free_bytes: int | None
    state_bytes: int = 0
    active_bytes: int = 0
    left_bytes: int = 0
    drafter_bytes: int = 0
    drafter_session_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of all sessions' caches, the drafter's among them."""
        return self.sessions * (self.session_bytes + self.drafter_session_bytes)

    @property
    def total_bytes(self) -> int:
        """Weights, the drafter's too, caches and working memory."""
        weights = self.weight_bytes + self.drafter_bytes
        return weights + self.cache_bytes + self.working_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits the free memory; None where that is unknown."""
        return None if self.free_bytes is None else self.total_bytes <= self.free_bytes

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.free_bytes is None:
            return f"needs {megabytes(self.total_bytes)}; this machine does not say what is free"
        if self.fits:
            return (
                f"fits: {megabytes(self.free_bytes - self.total_bytes)} of "
                f"{megabytes(self.free_bytes)} free memory stay free"
            )
        short = self.total_bytes - self.free_bytes
        room = self.free_bytes - (self.total_bytes - self.cache_bytes)
        if room <= 0 or not self.cache_bytes:
            way = "a smaller quantization or more memory is needed"
        else:
            tokens = int(self.context * room / self.cache_bytes)
            way = f"about {tokens} tokens a session would fit"
        return f"does not fit: {megabytes(short)} are lacking; {way}"

    def as_dict(self) -> dict[str, Any]:
        """Every number by its name."""
        names = self.__slots__
        fields = {name: getattr(self, name) for name in names}
        extra = ("cache_bytes", "total_bytes", "fits", "verdict")
        return fields | {name: getattr(self, name) for name in extra}

    def __repr__(self) -> str:
        rows = [
            ("weights", self.weight_bytes, f"{self.num_tensors} tensors, "
             f"{megabytes(self.file_bytes)} on disk" + self._left_note() + self._active_note()),
            *([("drafter", self.drafter_bytes, "its weights")] if self.drafter_bytes else []),
            ("caches", self.cache_bytes,
             f"{self.sessions} x {megabytes(self.session_bytes + self.drafter_session_bytes)}, a "
             f"session of {self.context} tokens" + self._state_note()),
            ("working", self.working_bytes, "one prefill chunk and the logits, estimated"),
            ("total", self.total_bytes, self.verdict),
        ]  # fmt: skip
        lines = [f"{name:<8} {megabytes(size):>12}   {note}" for name, size, note in rows]
        return "\n".join([f"{self.source} ({self.model_type})", *lines])

    def _left_note(self) -> str:
        if not self.left_bytes:
            return ""
        return f", where {megabytes(self.left_bytes)} stay and are read row by row"

    def _active_note(self) -> str:
        if self.active_bytes in (0, self.weight_bytes):
            return ""
        return f", {megabytes(self.active_bytes)} of them for one token"

    def _state_note(self) -> str:
        parts = (self.state_bytes, "recurrent state"), (self.drafter_session_bytes, "the drafter's")
        return "".join(f", {megabytes(size)} of it {name}" for size, name in parts if size)


def plan(
    path_or_repo: str | os.PathLike[str],
    context: int = PLAN_CONTEXT,
    sessions: int = PLAN_SESSIONS,
    *,
    quantize: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    local_files_only: bool = False,
    draft: str | os.PathLike[str] = "auto",
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
        draft: as for `load`; of a Hub id the whole drafter is fetched.

    Raises:
        OptionError: the context is beyond `LONGEST_CONTEXT`, `quantize` is unknown, or there is
            no such drafter.
        SourceError: no checkpoint is there.
        ConfigError: its configuration is damaged or not implemented.
        CheckpointError: its headers are damaged or not those of the configuration.
    """
    check_context(context)
    wish = parse_quantize(quantize)
    source = resolve_headers(path_or_repo, revision=revision, local_files_only=local_files_only)
    shape = outline(source, dequantize)
    caches = shape.causal.make_caches(context, RING_SLACK)
    handling = Handling(on_cpu(), wish)
    held, active = shape.held_bytes(handling)
    drafter, drafter_rows = _drafter_bytes(
        draft, shape, source.path, handling, context, local_files_only
    )
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
        drafter_bytes=drafter,
        drafter_session_bytes=drafter_rows,
    )


def _drafter_bytes(
    draft: str | os.PathLike[str],
    shape: Outline,
    place: Path,
    handling: Handling,
    context: int,
    local_files_only: bool,
) -> tuple[int, int]:
    """Bytes of a drafter's weights, and of its caches in one session."""
    if draft in {"off", "ngram"}:
        return 0, 0
    found = find_drafter(
        draft, shape.config, shape.causal, place,
        arrays=shape.arrays, local_files_only=local_files_only,
    )  # fmt: skip
    if isinstance(found, str):
        return 0, 0
    if isinstance(found, Source):
        other = outline(found)
        held = other.held_bytes(handling)[0]
        drafter = ModelDrafter(other.causal, shape.causal.vocab_size)
    else:
        try:
            held = sum(held_sizes(found.module, found.weights(), found.where, handling).values())
        except CheckpointError:
            if draft == "auto":  # loading goes without it
                return 0, 0
            raise
        drafter = found.drafter()
    return held, session_bytes(drafter.new_state(context).caches, context)


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


def megabytes(count: int) -> str:
    """A number of bytes for people: decimal megabytes, kilobytes of few, gigabytes of many."""
    if 0 < count < 10**5:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 10**10 else f"{count / 1e6:.1f} MB"


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

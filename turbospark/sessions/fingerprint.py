"""What a saved session depends on, in short: another model must not continue it."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType]

from turbospark.kernels.device import on_cpu
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.linear import Matrix
from turbospark.nn.ngram_table import sampled_rows

_SAMPLES = 4096
_ROWS = 16
_SAYS_NOTHING = ("_name_or_path", "transformers_version")

Fingerprint = dict[str, Any]
"""Part to a value that JSON can hold."""


class Spelled(Protocol):
    """What is asked of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        ...


def fingerprint(model: Any, config: Mapping[str, Any], tokenizer: Spelled) -> Fingerprint:
    """The parts of a model that decide whether it may continue a session.

    Args:
        model: a family's model; of its weights a sample of every array is read.
        config: its configuration.
        tokenizer: its tokenizer; compared by content, whatever file it came from.
    """
    meant = {name: value for name, value in config.items() if name not in _SAYS_NOTHING}
    return {
        "model type": config.get("model_type"),
        "configuration": _hash(json.dumps(meant, sort_keys=True, default=str).encode()),
        "quantization": _layouts(model),
        "weights": _sampled(model),
        "tokenizer": tokenizer_digest(tokenizer),
        "device": "cpu" if on_cpu() else "gpu",
    }


def drafter_identity(drafter: Any) -> str:
    """The kind of a drafter, and a digest of the weights it has of its own, if any."""
    modules = [
        part
        for part in cast("dict[str, Any]", vars(drafter)).values()
        if isinstance(part, nn.Module)
    ]
    return " ".join([drafter.name, *map(_sampled, modules)])


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """In words, every part in which two fingerprints differ."""
    found: list[str] = []
    for part in dict.fromkeys([*own, *saved]):
        ours, theirs = own.get(part), saved.get(part)
        if ours == theirs:
            continue
        told = _told(ours), _told(theirs)
        found.append(f"{part} ({told[1]} in the file, {told[0]} here)" if all(told) else part)
    return found


def tokenizer_digest(tokenizer: Spelled) -> str:
    """A digest of what a tokenizer does: its vocabulary, a text's ids, its ends, its template."""
    spelled = [tokenizer.token_text(token) for token in range(tokenizer.vocab_size)]
    probe = "The 3 cats' naïve \t plan cost 12,50 €\n\n    def f(x): 日本語 👩‍👧"
    rest = [tokenizer.encode(probe), sorted(tokenizer.eos_ids), tokenizer.chat_template]
    return _hash(json.dumps([spelled, rest]).encode())


def _layouts(model: Any) -> str:
    """The layouts of a model's matrices, each with how many have it."""
    counts: Counter[str] = Counter()
    if isinstance(model, nn.Module):
        for _, module in cast("list[tuple[str, Any]]", model.named_modules()):
            if isinstance(module, Matrix) and "weight" in module:
                weight = module.value
                counts[
                    f"{weight.mode} {weight.bits} bit g{weight.group_size}"
                    if isinstance(weight, QuantizedWeight)
                    else "float"
                ] += 1
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "none"


def _sampled(model: Any) -> str:
    """A digest over evenly spread elements of every weight array, and rows of tables in files."""
    digest = hashlib.sha256()
    if isinstance(model, nn.Module):
        for path, rows in sampled_rows(model, _ROWS):
            digest.update(f"{path} {rows.shape} {rows.dtype}".encode())
            digest.update(np.asarray(rows.view(mx.uint8)).data)
        parameters = cast("Iterable[tuple[str, mx.array]]", tree_flatten(model.parameters()))
        for name, array in sorted(parameters, key=lambda item: item[0]):
            # An odd stride meets every column of a group in turn.
            stride = max(array.size // _SAMPLES, 1) | 1
            part = mx.contiguous(array.reshape(-1)[::stride]).view(mx.uint8)
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(np.asarray(part).data)
    return digest.hexdigest()


def _told(value: Any) -> str:
    """A part's value where people can read it: digests say nothing."""
    text = str(value)
    return "" if len(text) == 64 else text


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""An engine over a scripted model: everything but weights."""

from pathlib import Path
from typing import Any, cast

from turbospark.api import Engine
from turbospark.kernels.select import choose_kernels
from turbospark.loading.build import LoadedModel
from turbospark.protocols import Drafter
from turbospark.settings import KernelPolicy, RunnerConfig, resolve
from turbospark.testing.models import ScriptedModel
from turbospark.testing.text import ByteTokenizer


def scripted_engine(
    model: ScriptedModel | None = None,
    tokenizer: ByteTokenizer | None = None,
    *,
    drafter: Drafter | None = None,
    **options: Any,
) -> Engine:
    """An engine as `load` would give it.

    Args:
        model: a `ScriptedModel` of hashed logits by default.
        tokenizer: a `ByteTokenizer` by default; its `eos_ids` end a text.
        drafter: proposes tokens; nothing does by default.
        options: of `RunnerConfig`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    loaded = LoadedModel(
        model=model or ScriptedModel(),
        config={"model_type": "scripted"},
        tokenizer=cast(Any, tokenizer),
        source=Path("scripted"),
        stop_ids=tokenizer.eos_ids,
        kernels=choose_kernels(KernelPolicy(kernels="reference")),
        bodies={},
    )
    return Engine(loaded, resolve(RunnerConfig, options), drafter)

"""From what a user asks for to a drafter over a loaded model."""

import logging
import os
from typing import cast

from turbospark.errors import CheckpointError
from turbospark.kernels.device import on_cpu
from turbospark.loading.build import LoadedModel, Progress, set_weights
from turbospark.loading.drafter_modules import find_drafter
from turbospark.loading.install import Handling
from turbospark.loading.opened import open_checkpoint
from turbospark.loading.quantize import Quantization, parse_quantize
from turbospark.loading.source import Source
from turbospark.nn.unit import bind_units
from turbospark.protocols import CausalModel, Drafter
from turbospark.speculation.model import ModelDrafter
from turbospark.speculation.ngram import NgramDrafter
from turbospark.speculation.off import NoDrafter
from turbospark.speculation.tokenizers import check_draft_model

_log = logging.getLogger("turbospark")


def load_drafter(
    draft: str | os.PathLike[str],
    target: LoadedModel,
    *,
    quantize: str | None = None,
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> Drafter:
    """Open a drafter.

    Args:
        draft: "auto" is the checkpoint's own prediction head where it has one, and else none;
            "off" is none; "ngram" looks tokens up in the text; "mtp" is the head, or an error.
            Anything else leads to a checkpoint: of a block drafter (its config.json has a
            `dflash_config`, or a block size and a mask's token), of a prediction head alone, or of
            a draft model.
        target: the model drafted for; its table and head are shared, its kernels run.
        quantize: quantize a drafter's float weights while loading, as for a model.
        local_files_only: never ask the Hub.
        progress: called with bytes done and bytes in all, of a draft model.

    Returns:
        The drafter; one that proposes nothing says why.

    Raises:
        OptionError: the drafter asked for does not exist or does not suit the model.
        SourceError: the path or Hub id leads to no checkpoint.
        ConfigError: its configuration is damaged or not implemented.
        CheckpointError: its weights are damaged, or not those of the configuration.
    """
    if draft == "off":
        return NoDrafter()
    if draft == "ngram":
        return NgramDrafter()
    wish = parse_quantize(quantize)
    config, model, folder = target.config, target.model, target.source
    found = find_drafter(draft, config, model, folder, local_files_only=local_files_only)
    if isinstance(found, str):
        return NoDrafter(found)
    if isinstance(found, Source):
        return _draft_model(found, target, wish, progress)
    try:
        found.install(Handling(on_cpu(), wish))
    except CheckpointError as error:
        if draft == "auto":
            return NoDrafter(str(error))
        raise
    bind_units(found.module, target.kernels)
    storage = getattr(found.module, "norms", None)
    if storage is not None:
        _log.info("the prediction head's norms hold %s: %s", storage.holds, storage.reason)
    return found.drafter()


def _draft_model(
    source: Source, target: LoadedModel, wish: Quantization | None, progress: Progress | None
) -> ModelDrafter:
    opened = open_checkpoint(source)
    model = cast("CausalModel", opened.model)
    check_draft_model(target.tokenizer, opened.tokenizer, model.vocab_size, source.path)
    set_weights(opened, Handling.of(source, None if opened.is_quantized else wish), progress)
    bind_units(opened.model, target.kernels)
    return ModelDrafter(model, target.model.vocab_size)

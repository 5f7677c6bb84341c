"""Qwen 3.5, text: `qwen3_5` and `qwen3_5_moe`, and the text parts of both.

Most layers fold the past into fast weights (a gated delta net), every fourth attends to it.
"""

from collections.abc import Mapping
from typing import Any

from families.qwen3_5.config import qwen3_5_rope, read_qwen3_5
from families.qwen3_5.model import Qwen3_5Model
from families.qwen3_5.mtp import build_mtp
from turbospark.nn.dflash import build_dflash
from turbospark.protocols import Family


def build(raw: Mapping[str, Any]) -> Qwen3_5Model:
    """A text model with unset weights."""
    config = read_qwen3_5(raw)
    return Qwen3_5Model(config, qwen3_5_rope(raw, config))


FAMILY = Family(name="qwen3_5", build=build, drafters={"mtp": build_mtp, "dflash": build_dflash})

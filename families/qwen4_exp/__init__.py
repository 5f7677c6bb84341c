"""Qwen 4 (experimental), text: `qwen4_exp`, and the text part of it.

Several residual streams, mixers and experts between mixtures of them, hashed n-grams whose table
may stay on disk, and attention that reads chosen blocks of rows.
"""

from collections.abc import Mapping
from typing import Any

from families.qwen4_exp.config import read_qwen4_exp, read_ropes
from families.qwen4_exp.model import Qwen4ExpModel, Ropes
from families.qwen4_exp.mtp import build_mtp
from turbospark.errors import UnsupportedError
from turbospark.protocols import Family

TYPES = ("qwen4_exp", "qwen4_exp_text")


def build(raw: Mapping[str, Any]) -> Qwen4ExpModel:
    """A text model with unset weights.

    Raises:
        UnsupportedError: the configuration is of another family, or asks for what none has.
    """
    kind = raw.get("model_type", TYPES[0])
    if kind not in TYPES:
        raise UnsupportedError(f"model type {kind!r} is not of the qwen4_exp family")
    config = read_qwen4_exp(raw)
    return Qwen4ExpModel(config, Ropes(*read_ropes(raw, config)))


FAMILY = Family(name="qwen4_exp", build=build, drafters={"mtp": build_mtp})

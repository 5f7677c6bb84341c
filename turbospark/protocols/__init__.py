"""What the rooms promise each other: protocols with several implementations, and plain values."""

from turbospark.protocols.drafters import Drafter, DrafterState
from turbospark.protocols.models import (
    CausalModel,
    DrafterBuilder,
    Family,
    ForwardOutput,
    GGUFMapping,
    LayerCache,
    LogitRows,
    Phase,
    RowInputs,
)
from turbospark.protocols.producers import (
    ChunkedPrefillRunner,
    LogitProducer,
    Reuse,
    RollbackPoint,
    SpeculativeProducer,
    Verified,
)

__all__ = [
    "CausalModel",
    "ChunkedPrefillRunner",
    "Drafter",
    "DrafterBuilder",
    "DrafterState",
    "Family",
    "ForwardOutput",
    "GGUFMapping",
    "LayerCache",
    "LogitProducer",
    "LogitRows",
    "Phase",
    "Reuse",
    "RollbackPoint",
    "RowInputs",
    "SpeculativeProducer",
    "Verified",
]

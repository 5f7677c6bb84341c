"""What heads that predict the token after the next (multi-token prediction) have in common."""

from collections.abc import Mapping
from typing import Any, cast

from turbospark.errors import UnsupportedError
from turbospark.nn.linear import Embedding, Matrix

_PREFIX = "mtp."


def announces_head(depth: int) -> bool:
    """Whether a configuration announces a head.

    Args:
        depth: its `mtp_num_hidden_layers`.

    Raises:
        UnsupportedError: the head has more than one layer.
    """
    if depth > 1:
        raise UnsupportedError(
            f"config.json: mtp_num_hidden_layers={depth} is not implemented: known heads have 1"
        )
    return depth == 1


def shared_matrices(model: Any) -> tuple[Embedding, Matrix]:
    """The table and the output head of a trunk, which its prediction head uses too."""
    table = cast("Embedding", model.model.embed_tokens)
    return table, model.get("lm_head", table)


def head_tensors(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a head, without the prefix that sets them apart from a trunk's.

    Names of a file that has no such prefix are taken as they are.
    """
    split = {name: f".{name}".partition(f".{_PREFIX}")[2] for name in weights}
    if not any(split.values()):
        return dict(weights)
    return {split[name]: value for name, value in weights.items() if split[name]}

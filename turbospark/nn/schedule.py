"""Which kind of layer stands where, in families that mix delta nets with attention."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from turbospark.errors import ConfigError, UnsupportedError

Kind = TypeVar("Kind", bound=str)


def read_schedule(
    given: Sequence[str] | None, count: int, interval: int, kinds: Mapping[str, Kind]
) -> tuple[Kind, ...]:
    """The kind of every layer: as listed, else every n-th one attends to all rows.

    Args:
        given: `layer_types` of a configuration, or None.
        count: layers.
        interval: n.
        kinds: what each spelling in a configuration means.

    Raises:
        ConfigError: the list has another length.
        UnsupportedError: a kind is unknown, or no layer is linear.
    """
    if given is None:
        full = [(i + 1) % interval == 0 for i in range(count)]
        given = ["full_attention" if flag else "linear_attention" for flag in full]
    if len(given) != count:
        raise ConfigError(
            f"config.json: layer_types lists {len(given)} layers, but num_hidden_layers={count}"
        )
    for i, kind in enumerate(given):
        if kind not in kinds:
            raise UnsupportedError(f"config.json: layer_types[{i}]={kind!r} is not implemented")
    schedule = tuple(kinds[kind] for kind in given)
    if "linear_attention" not in schedule:
        raise UnsupportedError(
            "config.json: layer_types without a linear_attention layer are not implemented: "
            "the filters of such layers tell how the checkpoint stores its norms"
        )
    return schedule

"""The table of families names every registered type, and no other."""

import re
from pathlib import Path

from turbospark.registry import GGUF_GROUP, known_types

TABLE = Path(__file__).parents[2] / "families" / "README.md"


def column(number):
    """Names in one column of the first table."""
    rows = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")][
        1:
    ]
    own = [row for row in rows if len(row) == 9]
    return {name for row in own for name in re.findall(r"`(\w+)`", row[number])}


def test_every_model_type_has_a_row():
    assert column(1) == set(known_types())


def test_every_gguf_architecture_has_a_row():
    assert column(6) == set(known_types(GGUF_GROUP))

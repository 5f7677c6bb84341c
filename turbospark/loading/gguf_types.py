"""The tensor types of GGUF files: how large a block is and what turbospark makes of it."""

from dataclasses import dataclass

from turbospark.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class TensorType:
    """One ggml type.

    Attributes:
        name: as llama.cpp spells it.
        values: weights in one block.
        block_bytes: bytes of one block.
    """

    name: str
    values: int
    block_bytes: int


_TABLE = """
0 F32 1 4; 1 F16 1 2; 2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24; 8 Q8_0 32 34;
9 Q8_1 32 40; 10 Q2_K 256 84; 11 Q3_K 256 110; 12 Q4_K 256 144; 13 Q5_K 256 176; 14 Q6_K 256 210;
15 Q8_K 256 292; 16 IQ2_XXS 256 66; 17 IQ2_XS 256 74; 18 IQ3_XXS 256 98; 19 IQ1_S 256 50;
20 IQ4_NL 32 18; 21 IQ3_S 256 110; 22 IQ2_S 256 82; 23 IQ4_XS 256 136; 24 I8 1 1; 25 I16 1 2;
26 I32 1 4; 27 I64 1 8; 28 F64 1 8; 29 IQ1_M 256 56; 30 BF16 1 2; 34 TQ1_0 256 54; 35 TQ2_0 256 66;
39 MXFP4 32 17
"""


def _parse(table: str) -> dict[int, TensorType]:
    types: dict[int, TensorType] = {}
    for row in table.split(";"):
        number, name, values, size = row.split()
        types[int(number)] = TensorType(name, int(values), int(size))
    return types


TYPES = _parse(_TABLE)
DENSE = ("F32", "F16", "BF16")
LOSSLESS = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
DEQUANTIZED = ("Q2_K", "Q3_K")


def require_readable(kind: TensorType, where: str, dequantize: bool) -> None:
    """Refuse by name a type that this library has no layout for.

    Raises:
        UnsupportedError: with the way out, where there is one.
    """
    if kind.name in DENSE or kind.name in LOSSLESS:
        return
    if kind.name in DEQUANTIZED:
        if dequantize:
            return
        raise UnsupportedError(
            f"{where} is {kind.name}, which does not fit the quantized layout; pass "
            "dequantize=True to keep it as float32, or use a Q4_K_M file of the same model"
        )
    raise UnsupportedError(
        f"{where} is {kind.name}, which is not implemented; use a file of the same model in one "
        f"of {', '.join((*LOSSLESS, *DENSE))}"
    )

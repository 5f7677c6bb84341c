"""A byte-level tokenizer.json: every byte, three marks, and common English words."""

from typing import Any

MARKS = ("<bos>", "<eos>", "<end>")
"""The special tokens, of ids 256, 257 and 258 as in `ByteTokenizer`."""

LEAST_IDS = 256 + len(MARKS)

_WORDS = (
    " the of and to in is that it was for on are with as his they be at one have this from or had "
    "by not but some what there we can out other were all your when up use word how said each she "
    "which their time will way about many then them would write like so these her long make thing "
    "see him two has look more day could go come did my sound no most number who over know water"
)


def byte_level_tokenizer(size: int = LEAST_IDS) -> dict[str, Any]:
    """A tokenizer.json of exactly `size` ids, 259 or more.

    Ids from 259 on are words and their beginnings, as a tokenizer learns them; where those run
    out, marks that no text holds.
    """
    symbols = _symbols()
    vocabulary = {symbols[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    marks: dict[str, int] = dict(zip(MARKS, range(256, LEAST_IDS), strict=True))
    for word in _WORDS.split():
        grown = symbols[ord(" ")]
        for letter in word:
            pair = grown, letter
            grown += letter
            if grown not in vocabulary and LEAST_IDS + len(merges) < size:
                vocabulary[grown] = LEAST_IDS + len(merges)
                merges.append(pair)
    for index in range(LEAST_IDS + len(merges), size):
        marks[f"<unused{index}>"] = index
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index, "content": mark, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for mark, index in marks.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "post_processor": None,
        "model": {
            "type": "BPE", "merges": [list(pair) for pair in merges], "vocab": vocabulary | marks,
        },
    }  # fmt: skip


def _symbols() -> dict[int, str]:
    """The character that stands for each byte, as GPT-2 chose them."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in letters]
    symbols = {byte: chr(byte) for byte in letters}
    return symbols | {byte: chr(256 + index) for index, byte in enumerate(others)}

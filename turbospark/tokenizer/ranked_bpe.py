"""Vocabularies that merge by rank, built from the token and merge lists of a GGUF file."""

from collections.abc import Iterable, Sequence
from typing import Any

from turbospark.tokenizer.pretokenizers import PreTokenizer
from turbospark.tokenizer.tokenizer_json import add_tokens, guarded
from turbospark.tokenizer.vocabulary import AddedToken

Merge = tuple[str, str]


def build_byte_level_bpe(
    names: Sequence[str],
    merges: list[Merge],
    added: Iterable[AddedToken],
    pre: PreTokenizer,
    source: str,
) -> Any:
    """A BPE over bytes, each written as a character, as in GPT-2.

    Args:
        names: the spelling of each id; pairwise different.
        merges: what merges, strongest first.
        added: tokens found in a text as they are.
        pre: how the text is cut first.
        source: the file that messages name.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        TokenizerError: a merge names a token that is not in the list, or gives one.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {name: token for token, name in enumerate(names)}

    def work() -> Any:
        tokenizer: Any = Tokenizer(
            models.BPE(vocabulary, merges, ignore_merges=pre.whole_words),
        )
        splits: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        if pre.nfc:
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    tokenizer = guarded(source, work)
    add_tokens(tokenizer, added, source)
    return tokenizer


def build_escaped_bpe(
    names: Sequence[str],
    merges: list[Merge],
    added: Iterable[AddedToken],
    unknown: str | None,
    source: str,
) -> Any:
    """A BPE over characters, spaces written as `▁`, other characters as byte tokens, as in Gemma 4.

    Args:
        names, merges, added, source: as in `build_byte_level_bpe`.
        unknown: the token for what neither characters nor byte tokens spell.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        TokenizerError: a merge names a token that is not in the list, or gives one.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {name: token for token, name in enumerate(names)}

    def work() -> Any:
        tokenizer: Any = Tokenizer(
            models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer

    tokenizer = guarded(source, work)
    add_tokens(tokenizer, added, source)
    return tokenizer

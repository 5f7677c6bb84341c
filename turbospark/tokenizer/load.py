"""Building a checkpoint folder's tokenizer from the files it has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbospark.errors import TokenizerError
from turbospark.tokenizer.chat import templates_from_folder
from turbospark.tokenizer.files import TokenizerFiles
from turbospark.tokenizer.front import Tokenizer
from turbospark.tokenizer.sentencepiece_model import NO_DUMMY_PREFIX, read_normalizer
from turbospark.tokenizer.spm import SentencePieceVocabulary, load_processor, piece_text
from turbospark.tokenizer.tokenizer_json import (
    TokenizersVocabulary,
    add_tokens,
    load_tokenizer_json,
    wrapping_ids,
)
from turbospark.tokenizer.vocabulary import AddedToken, SpecialTokens, Vocabulary

_OTHER_KINDS = ("tekken.json", "vocab.json", "merges.txt", "spiece.model", "vocab.txt")


def load_tokenizer(folder: Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
    """Build the tokenizer of a checkpoint folder.

    Of several vocabularies tokenizer.json counts, else tokenizer.model. tokenizer_config.json adds
    tokens and says which are special, and whether begin and end of text go around a text: what it
    says explicitly overrides the post-processor of tokenizer.json. Without tokenizer_config.json,
    tokenizer.model gets its begin of text put before a text, as llama.cpp does.

    Args:
        folder: the checkpoint.
        config: config.json; names the begin and end of text where the tokenizer's files do not,
            and its vocab_size says how many rows the embedding has.

    Raises:
        TokenizerError: no vocabulary is there, or a file is damaged or contradicts another; names
            the file.
        TemplateError: a chat template's file is damaged.
    """
    files = TokenizerFiles(Path(folder), config or {})
    if (files.folder / "tokenizer.json").exists():
        vocabulary, special = _from_tokenizer_json(files)
    elif (files.folder / "tokenizer.model").exists():
        vocabulary, special = _from_sentencepiece(files)
    else:
        raise _no_vocabulary(files.folder)
    templates = templates_from_folder(files.folder, files.settings)
    return Tokenizer(vocabulary, special, templates, files.padded_size())


def _from_tokenizer_json(files: TokenizerFiles) -> tuple[Vocabulary, SpecialTokens]:
    path = files.folder / "tokenizer.json"
    tokenizer = load_tokenizer_json(path)
    known = tokenizer.get_added_tokens_decoder()
    add_tokens(
        tokenizer,
        [token for token in files.added() if token.id not in known],
        str(files.settings_path),
    )
    texts = {value.content for value in tokenizer.get_added_tokens_decoder().values()}
    registered = [
        AddedToken(content=text, id=tokenizer.token_to_id(text))
        for text in {*files.named().values(), *files.extra_special()} - texts
        if tokenizer.token_to_id(text) is not None
    ]
    add_tokens(tokenizer, registered, str(files.settings_path))
    vocabulary = TokenizersVocabulary(tokenizer, str(path))
    before, after = wrapping_ids(tokenizer, str(path))
    own = SpecialTokens(before=before, after=after)
    return vocabulary, _special_tokens(files, vocabulary, own)


def _from_sentencepiece(files: TokenizerFiles) -> tuple[Vocabulary, SpecialTokens]:
    path = files.folder / "tokenizer.model"
    try:
        model = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    normalizer = read_normalizer(model, str(path))
    processor = load_processor(model, str(path))
    once = files.flag("legacy") is False and normalizer.add_dummy_prefix
    added = files.added()
    vocabulary = SentencePieceVocabulary(
        processor,
        normalizer,
        str(path),
        added=[*_own_special(processor, files, str(path)), *added],
        later=load_processor(model + NO_DUMMY_PREFIX, str(path)) if once else None,
    )
    named: dict[str, str] = {}
    for name, token in (("bos_token", processor.bos_id()), ("eos_token", processor.eos_id())):
        if token >= 0:
            named[name] = vocabulary.token_text(token)
    before = (int(processor.bos_id()),) if processor.bos_id() >= 0 else ()
    return vocabulary, _special_tokens(files, vocabulary, SpecialTokens(before=before, named=named))


def _own_special(processor: Any, files: TokenizerFiles, source: str) -> list[AddedToken]:
    """The model's pieces that stand for no text of their own, or that a file calls special."""
    ids = range(processor.GetPieceSize())
    found = {token for token in ids if processor.IsControl(token) or processor.IsUnknown(token)}
    for text in {*files.named().values(), *files.extra_special()}:
        token = processor.PieceToId(text)
        if piece_text(processor, token, source) == text:
            found.add(token)
    return [
        AddedToken(content=piece_text(processor, token, source), id=token)
        for token in sorted(found)
    ]


def _special_tokens(
    files: TokenizerFiles, vocabulary: Vocabulary, own: SpecialTokens
) -> SpecialTokens:
    """Complete what the vocabulary itself says by what the JSON files say."""
    named = own.named | files.named()
    bos = _named_id(files, vocabulary, named, "bos_token")
    eos = _named_id(files, vocabulary, named, "eos_token")
    config_bos, config_eos = files.config_ids("bos_token_id"), files.config_ids("eos_token_id")
    if bos is None:
        bos = next(iter([*own.before, *config_bos]), None)
    before, after = own.before, own.after
    if (adds := files.flag("add_bos_token")) is not None:
        before = _wrapping(files, bos, "bos_token") if adds else ()
    if (adds := files.flag("add_eos_token")) is not None:
        after = _wrapping(files, eos, "eos_token") if adds else ()
    return SpecialTokens(
        bos_id=bos,
        eos_ids=frozenset(config_eos if eos is None else [eos]),
        before=before,
        after=after,
        named=named,
    )


def _named_id(
    files: TokenizerFiles, vocabulary: Vocabulary, named: Mapping[str, str], name: str
) -> int | None:
    if name not in named:
        return None
    token = vocabulary.token_id(named[name])
    if token is None:
        raise files.fail(f"{name} is {named[name]!r}, which {vocabulary.source} does not hold")
    return token


def _wrapping(files: TokenizerFiles, token: int | None, name: str) -> tuple[int, ...]:
    if token is None:
        raise files.fail(f"add_{name} is true, but no file says which token {name} is")
    return (token,)


def _no_vocabulary(folder: Path) -> TokenizerError:
    others = [name for name in _OTHER_KINDS if (folder / name).exists()]
    hint = f" (found {', '.join(others)}, which is not implemented)" if others else ""
    return TokenizerError(
        f"{folder} has neither tokenizer.json nor tokenizer.model{hint}; "
        "copy one of them from the original checkpoint"
    )

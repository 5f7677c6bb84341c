"""Text to token ids and back: vocabularies, chat templates, incremental detokenizing."""

from turbospark.tokenizer.detokenizer import Detokenizer
from turbospark.tokenizer.front import Tokenizer
from turbospark.tokenizer.gguf import tokenizer_from_gguf
from turbospark.tokenizer.load import load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer", "tokenizer_from_gguf"]

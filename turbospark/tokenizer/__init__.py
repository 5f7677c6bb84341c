"""Text to token ids and back: vocabularies, chat templates, incremental detokenizing."""

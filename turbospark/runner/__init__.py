"""The loops that turn a prompt into tokens."""

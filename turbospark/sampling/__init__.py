"""Pure functions from logits to a token."""

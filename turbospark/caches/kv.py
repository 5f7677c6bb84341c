"""The append-only cache of full attention."""

from turbospark.caches.base import RowCache


class KVCache(RowCache):
    """Every row since position 0; rewinds any distance."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, max_context: int, value_dim: int | None = None
    ) -> None:
        super().__init__(num_kv_heads, head_dim, max_context, max_context, value_dim)

    def __repr__(self) -> str:
        return f"KVCache(max_context={self.max_context})"

    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back: all of them."""
        return self.offset

    def _refusal(self, count: int) -> str:
        return f"only {self.offset} were fed"

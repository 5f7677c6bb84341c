"""The cache of sliding-window attention: a ring of the newest rows."""

from turbospark.caches.base import RowCache


class RingCache(RowCache):
    """The newest rows of a layer that looks back `window` tokens, and `slack` rows more.

    A query sees itself and window - 1 rows before it. The slack is what can be rewound once the
    ring has wrapped: the rows that the window then reaches back to are still there.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, max_context: int, window: int, slack: int
    ) -> None:
        limit = min(max_context, window + slack)
        super().__init__(num_kv_heads, head_dim, max_context, limit=limit)
        self.window = self.reach = window
        self.slack = slack

    def __repr__(self) -> str:
        return f"RingCache(window={self.window}, slack={self.slack})"

    @property
    def rewind_bound(self) -> int | None:
        """The slack; None where the ring never wraps."""
        return self.slack if self._limit < self.max_context else None

    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back.

        All of them while no row was overwritten; then what is left of the slack, counted from the
        furthest position written, so that it does not depend on how the rows came in.
        """
        overwritten = self._furthest - self._limit
        if overwritten <= 0:
            return self.offset
        return max(0, self.offset - overwritten - self.window)

    def _refusal(self, count: int) -> str:
        kept = self.max_rewind()
        if kept == self.offset:
            return f"only {kept} were fed"
        return f"only the newest {kept} are kept past the window; prefill again from token 0"

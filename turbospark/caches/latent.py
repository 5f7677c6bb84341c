"""The cache of latent attention: what all heads of a layer read, one row a position."""

from turbospark.caches.kv import KVCache


class LatentCache(KVCache):
    """Every row since position 0, as the latent [L] and the rotated key [R] that heads share.

    The keys are the rows `k` of one head, the latents its rows `v`, from which each query head
    makes its own keys and values.
    """

    def __init__(self, latent_dim: int, rope_dim: int, max_context: int) -> None:
        super().__init__(1, rope_dim, max_context, latent_dim)

    def __repr__(self) -> str:
        return f"LatentCache(max_context={self.max_context})"

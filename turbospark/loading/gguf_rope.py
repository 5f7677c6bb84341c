"""RoPE scaling that GGUF files of Llama 3.1 and later keep as a tensor of divisors."""

from typing import Any, cast

import mlx.core as mx
import numpy as np

from turbospark.errors import UnsupportedError
from turbospark.kernels.rope import rope_frequencies
from turbospark.loading.arrays import Array
from turbospark.loading.gguf import GGUFFile

DIVISORS = "rope_freqs.weight"

# Every release that ships the tensor was made with these; the file does not repeat them.
_RELEASED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """config.json's `rope_scaling` that gives the divisors of a file.

    Args:
        file: a file that has the tensor.
        config: theta and the head size.

    Raises:
        UnsupportedError: they follow no rule that is implemented.
    """
    weight = file.read(DIVISORS)
    dense = weight if isinstance(weight, mx.array) else mx.zeros(0)
    divisors = cast("Array", np.asarray(dense.astype(mx.float32)))
    head_dim, theta = int(config["head_dim"]), float(config["rope_theta"])
    if divisors.shape == (head_dim // 2,) and bool(np.isfinite(divisors).all()):
        factor = float(divisors.max())
        if factor >= 1.0:
            scaled, _ = rope_frequencies("llama3", theta, head_dim, factor=factor, **_RELEASED)
            plain, _ = rope_frequencies("default", theta, head_dim)
            if np.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):
                return {"rope_type": "llama3", "factor": factor, **_RELEASED}
    raise UnsupportedError(
        f"{file.path}: the divisors in {DIVISORS!r} are not those of Llama 3.1's RoPE scaling, "
        "the only kind of them that is implemented; use a safetensors release of the model"
    )

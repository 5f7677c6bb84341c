"""MLX's arrays as numpy sees them."""

from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def as_numpy(array: mx.array) -> NDArray[np.float32]:
    """An evaluated float32 array's own memory on a CPU, a copy on a GPU; read it only."""
    return cast(Any, np.asarray(cast(Any, array)))

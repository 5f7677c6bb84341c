"""The one process that may compute: a fork copies none of MLX's threads."""

import os

from turbospark.errors import KernelError

_owner: list[int] = []


def claim_process() -> None:
    """Note that this process computes with MLX; called before anything is evaluated.

    Raises:
        KernelError: it was forked from one that did. MLX would wait for a thread that is not
            there, forever.
    """
    if not _owner:
        _owner.append(os.getpid())
    if _owner[0] != os.getpid():
        raise KernelError(
            f"this process was forked from {_owner[0]}, which had loaded a model, and a fork "
            "copies no threads, so nothing can be computed here; fork before the first load, or "
            "start processes with multiprocessing's 'spawn' method"
        )

"""Choosing the target whose kernel bodies run."""

import mlx.core as mx

from turbospark.errors import KernelError
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.target import KernelSet
from turbospark.settings import KernelPolicy


def choose_kernels(policy: KernelPolicy) -> KernelSet:
    """The target that a policy asks for, or the best one here where it leaves the choice open.

    Raises:
        KernelError: the policy names a target or a host option that cannot be honoured here.
    """
    if policy.kernels in {"metal", "cuda"}:
        raise KernelError(
            f"kernels={policy.kernels!r} has no kernel bodies in this version; "
            "use 'auto', which runs MLX's own operations on a GPU"
        )
    _refuse_host_options(policy, "the reference target")
    return ReferenceKernels()


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.cpu


def _refuse_host_options(policy: KernelPolicy, target: str) -> None:
    wrong = {
        "activations": policy.activations in {"pair", "int8"},
        "isa": policy.isa != "auto",
    }
    for name, refused in wrong.items():
        if refused:
            raise KernelError(
                f"{name}={getattr(policy, name)!r} belongs to the host target, but "
                f"{target} runs here; leave {name} at its default"
            )

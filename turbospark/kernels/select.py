"""Choosing the target whose kernel bodies run."""

import logging

import mlx.core as mx

from turbospark.errors import KernelError
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.target import KernelSet
from turbospark.settings import KernelPolicy

_log = logging.getLogger("turbospark")


def on_cpu() -> bool:
    """Whether MLX computes on the CPU here."""
    return mx.default_device() == mx.cpu


def choose_kernels(policy: KernelPolicy) -> KernelSet:
    """The target that a policy asks for, or the best one here where it leaves the choice open.

    Without a usable compiler a CPU runs the reference, and one line in the log says so.

    Raises:
        KernelError: the policy names a target or a host option that cannot be honoured here.
    """
    wanted = policy.kernels
    if wanted in {"metal", "cuda"}:
        raise KernelError(
            f"kernels={wanted!r} has no kernel bodies in this version; "
            "use 'auto', which runs MLX's own operations on a GPU"
        )
    if wanted == "host" and not on_cpu():
        raise KernelError(
            "kernels='host' computes on the CPU, but MLX's default device is a GPU; "
            "call mx.set_default_device(mx.cpu) first, or use 'auto'"
        )
    if wanted == "reference" or not on_cpu():
        _refuse_host_options(policy)
        return ReferenceKernels()
    try:
        return _host_kernels(policy)
    except KernelError as error:
        if wanted == "host" or _host_options(policy) or policy.cxx:
            raise
        _log.warning("turbospark: %s; running MLX's operations, far slower on a CPU", error)
        return ReferenceKernels()


def _host_kernels(policy: KernelPolicy) -> KernelSet:
    from turbospark.kernels.host.target import HostKernels

    return HostKernels(policy)


def _host_options(policy: KernelPolicy) -> list[str]:
    """Options that only the host target can honour."""
    given: list[str] = []
    if policy.activations in {"pair", "int8"}:
        given.append(f"activations={policy.activations!r}")
    if policy.isa != "auto":
        given.append(f"isa={policy.isa!r}")
    return given


def _refuse_host_options(policy: KernelPolicy) -> None:
    given = _host_options(policy)
    if given:
        raise KernelError(
            f"{' and '.join(given)} belong to the host target, but the reference target was "
            "chosen; leave them at their defaults or use kernels='host' on a CPU"
        )

"""Choosing the target whose kernel bodies run."""

import logging

import mlx.core as mx

from turbospark.errors import KernelError
from turbospark.kernels.device import on_cpu
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.target import KernelSet
from turbospark.settings import KernelPolicy

_log = logging.getLogger("turbospark")


def choose_kernels(policy: KernelPolicy) -> KernelSet:
    """The target that a policy asks for, or the best one here where it leaves the choice open.

    Without a usable compiler a CPU runs the reference, and one line in the log says so.

    Raises:
        KernelError: the policy names a target or a host option that cannot be honoured here.
    """
    wanted = policy.kernels
    if wanted in {"metal", "cuda"} or (wanted == "auto" and not on_cpu()):
        return _gpu_kernels(policy)
    if wanted == "host" and not on_cpu():
        raise KernelError(
            "kernels='host' computes on the CPU, but MLX's default device is a GPU; "
            "call mx.set_default_device(mx.cpu) first, or use 'auto'"
        )
    _refuse_gpu_options(policy)
    if wanted == "reference":
        _refuse_host_options(policy, "reference")
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


def _gpu_kernels(policy: KernelPolicy) -> KernelSet:
    from turbospark.kernels.gpu.kernel import current_target
    from turbospark.kernels.gpu.target import GpuKernels

    target, wanted = current_target(), policy.kernels
    if target is None or wanted not in {"auto", target.name}:
        here = "no GPU that has kernel bodies" if target is None else target.name
        raise KernelError(
            f"kernels={wanted!r} cannot run: MLX computes on {mx.default_device()}, {here}; "
            "use 'auto'"
        )
    _refuse_host_options(policy, target.name)
    return GpuKernels(target, policy)


def _host_options(policy: KernelPolicy) -> list[str]:
    """Options that only the host target can honour."""
    given: list[str] = []
    if policy.activations in {"pair", "int8"}:
        given.append(f"activations={policy.activations!r}")
    if policy.isa != "auto":
        given.append(f"isa={policy.isa!r}")
    return given


def _refuse_host_options(policy: KernelPolicy, target: str) -> None:
    given = _host_options(policy)
    if given:
        raise KernelError(
            f"{' and '.join(given)} belong to the host target, but the {target} target was "
            "chosen; leave them at their defaults or use kernels='host' on a CPU"
        )


def _refuse_gpu_options(policy: KernelPolicy) -> None:
    if policy.disable_kernels:
        raise KernelError(
            f"disable_kernels={policy.disable_kernels!r} names bodies of a GPU, but none runs "
            "here; leave it empty"
        )

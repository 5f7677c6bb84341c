"""Host kernels of every instruction set this CPU has, compiled once a test run."""

import functools

import pytest

from turbospark.errors import KernelError
from turbospark.kernels.host.build import find_compiler
from turbospark.kernels.host.cpu import available_isas
from turbospark.kernels.host.target import HostKernels
from turbospark.settings import KernelPolicy

ISAS = available_isas()


@functools.cache
def host_kernels(isa: str, threads: int = 2) -> HostKernels:
    policy = KernelPolicy(kernels="host", activations="exact", isa=isa, threads=threads)
    try:
        find_compiler(policy)
    except KernelError as missing:
        pytest.skip(str(missing))
    return HostKernels(policy)

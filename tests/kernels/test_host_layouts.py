"""Every number of bits in every group size that the host multiplies, in both kinds of offsets."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from kernels.matrices import quantized, relative_error, rows

from turbospark.kernels.device import on_cpu
from turbospark.kernels.host.target import HostKernels
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

pytestmark = pytest.mark.skipif(not on_cpu(), reason="the host target needs a CPU")

LAYOUTS = [*itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128)), (6, 16)]
# float32 sums against double; activations rounded to 15 bits.
TOLERANCES = {"exact": 2e-5, "pair": 2e-3}


@pytest.fixture(scope="module", params=sorted(TOLERANCES))
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def kernels(mode):
    return HostKernels(KernelPolicy(activations=mode, threads=2))


@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
def test_every_layout_is_multiplied(kernels, mode, bits, group):
    x = rows(5, 384)
    for zero in (False, True):
        weight, values = quantized(37, 384, bits, group, zero=zero, scale_dtype=mx.float32)
        run = kernels.normed_projections(None, [weight], [None])
        assert run is not None
        expected = np.array(x).astype(np.float64) @ values.T
        for phase in Phase:
            (y,) = run(x, phase)
            assert relative_error(y, expected) < TOLERANCES[mode]

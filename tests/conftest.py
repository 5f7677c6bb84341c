"""Settings of the whole test process."""

import os

import pytest

# MLX multiplies float32 matrices in TF32 on an NVIDIA GPU, with 10 bits of each factor, unless
# told otherwise; expectations here are those of float32. It reads this when it first multiplies.
os.environ["MLX_ENABLE_TF32"] = "0"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Compile the host kernels once, before each process of the tests would."""
    from golden.fixtures import kernel_sets

    kernel_sets()

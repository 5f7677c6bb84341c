"""What the emulator reports."""


class EmulationError(RuntimeError):
    """A kernel cannot be emulated, would not compile for Metal, or did something wrong."""


class MetalCompileError(EmulationError):
    """Metal's compiler (or, in strict mode, CUDA's) would refuse this source."""


class MetalRunError(EmulationError):
    """A running kernel did what a GPU would answer with garbage, a hang or nothing at all."""

"""Kernel bodies of Metal and CUDA: one Metal text a kernel for both."""

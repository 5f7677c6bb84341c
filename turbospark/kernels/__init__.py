"""Kernels: one operation a file, each with a reference twin in plain MLX operations."""

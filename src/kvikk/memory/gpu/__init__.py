"""Kernels that move bytes of the pool."""

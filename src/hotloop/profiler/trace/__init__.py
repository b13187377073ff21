"""Operators and kernels, from torch's own profiler."""

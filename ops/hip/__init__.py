"""Kernels for gfx950 in HIP: sources, their compilation by clang, and their launch through the HIP runtime."""

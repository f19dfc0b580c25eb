"""Kernels for Hopper in CUDA C++: sources, their compilation by NVRTC, and their launch through the driver."""

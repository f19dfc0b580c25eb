"""How kernels in CUDA C++ are compiled, loaded, launched and launched again."""

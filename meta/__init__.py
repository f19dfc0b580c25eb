"""The meaning of each op apart from its kernels: fake implementations, autograd, vmap rules, and declarations."""

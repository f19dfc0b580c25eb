"""The meaning of each op apart from its kernels: autograd, vmap rules, and declarations."""

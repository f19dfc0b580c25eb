"""The ops, their references in plain PyTorch, and their kernels."""

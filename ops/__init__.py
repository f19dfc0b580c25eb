"""What runs: the ops, their plain-PyTorch references, and their kernels."""

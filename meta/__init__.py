"""What an op means without running it: fakes, autograd formulas, vmap rules, and the declaration of every op."""

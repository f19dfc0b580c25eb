"""How ops of fp8fn appear to Inductor: one node for all results of an op, and a choice for its autotuning."""

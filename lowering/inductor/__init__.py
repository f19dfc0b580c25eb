"""fp8fn's ops in Inductor: a lowering to one node for all results, and a choice for autotuning."""

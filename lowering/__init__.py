"""torch.compile: the backend, the rewriting of graphs, and `explain`."""

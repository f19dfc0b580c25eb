"""Benchmarks: what is measured, on which shapes, and the tables that `docs/` has of the results."""

"""Benchmarks: what is measured, on which shapes, and the results that the README's tables are made from."""

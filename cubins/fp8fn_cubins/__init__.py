"""Cubins of fp8fn's kernels, and their manifest: data that fp8fn reads. Nothing imports this package."""

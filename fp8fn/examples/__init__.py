"""Programs as short as a user's own: `python -m fp8fn.examples.NAME`, and by `torchrun` for several GPUs."""

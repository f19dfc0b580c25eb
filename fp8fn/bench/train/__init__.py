"""`python -m fp8fn bench train`: steps of unmodified models of transformers, in bf16 and FP8."""

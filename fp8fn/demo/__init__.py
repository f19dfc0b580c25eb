"""`python -m fp8fn demo`: trains a small GPT with and without FP8 products, and compares the two."""

"""`python -m fp8fn demo`: a small GPT trained twice, as it is and with its GEMMs in FP8, and the two compared."""

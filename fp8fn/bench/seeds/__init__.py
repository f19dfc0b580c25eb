"""`python -m fp8fn bench seeds`: the published protocols that fp8fn started from, beside their figures."""

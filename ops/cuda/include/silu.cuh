// The SiLU, x / (1 + exp(-x)).
#pragma once
#include "types.cuh"

// The relative error is under 1e-5 from -87 on. From -87.3 down the result is 0: __fdividef returns 0 for divisors
// past 2 ** 126. The SiLU's magnitude is under 2e-36 there.
INLINE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

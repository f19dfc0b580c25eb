// Eviction policies of the L2, for the instructions that take one.
#pragma once
#include "types.cuh"

INLINE uint64_t first_out_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

INLINE uint64_t last_out_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

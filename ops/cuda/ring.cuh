// Where the stages that bulk copies fill stand in their ring. Macros: STAGES.
#pragma once
#include "hopper.cuh"

// Position in the ring of stages; `parity` of the current pass over it.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    INLINE void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The position in a ring of stages that TMA fills. Macros: STAGES, where a kernel has one ring, `Ring`.
#pragma once
#include "hopper.cuh"

// A stage of a ring of COUNT, and the parity of the current pass over the ring.
template <int COUNT>
struct RingOf {
    int stage = 0;
    uint32_t parity = 0;

    INLINE void advance() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#ifdef STAGES
using Ring = RingOf<STAGES>;
#endif

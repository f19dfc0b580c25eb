// Where the stages that bulk copies fill stand in their ring. Macros: STAGES, where there is one ring, `Ring`.
#pragma once
#include "hopper.cuh"

// Position in a ring of COUNT stages; `parity` of the current pass over it.
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

// Maxima of several items over 16 lanes. Each lane ends with the maximum of one item, after half the shuffles that
// reducing every item in every lane takes.
//
// `lanes` are the four bits of a lane's number that distinguish the 16 lanes. COUNT is a power of two up to 16; with
// fewer items than lanes, several lanes end with the same item.
#pragma once
#include "types.cuh"

// Maxima of one number, and of two numbers of 16 bits.
struct Larger {
    INLINE uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};
struct LargerPair {
    INLINE uint32_t operator()(uint32_t a, uint32_t b) const { return __vmaxu2(a, b); }
};

// Each lane brings its part of all items, in `amax`, and returns the maximum of item `item`, which it sets.
template <typename Max = Larger, int COUNT>
INLINE uint32_t scatter_max(uint32_t (&amax)[COUNT], const int (&lanes)[4], int lane, int& item) {
    int count = COUNT;
    item = 0;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const bool upper = lane & lanes[step];
        if (count > 1) {
            count /= 2;
            item += upper ? count : 0;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const uint32_t kept = upper ? amax[i + count] : amax[i];
                const uint32_t sent = upper ? amax[i] : amax[i + count];
                amax[i] = Max()(kept, __shfl_xor_sync(~0u, sent, lanes[step]));
            }
        } else {
            amax[0] = Max()(amax[0], __shfl_xor_sync(~0u, amax[0], lanes[step]));
        }
    }
    return amax[0];
}

// The bits of the lowest lane that ends with `item`.
template <int COUNT>
INLINE int lane_of_item(int item, const int (&lanes)[4]) {
    int lane = 0;
#pragma unroll
    for (int step = 0, count = COUNT / 2; count > 0; ++step, count /= 2) lane |= item & count ? lanes[step] : 0;
    return lane;
}

// Whether the lane is the lowest that ends with its item.
template <int COUNT>
INLINE bool leads_item(int lane, const int (&lanes)[4]) {
    int others = 0;
#pragma unroll
    for (int step = 0, count = COUNT / 2; step < 4; ++step, count /= 2) others |= count == 0 ? lanes[step] : 0;
    return (lane & others) == 0;
}

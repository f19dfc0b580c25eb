// The groups of a grouped product, from their END offsets on the device; `fp8fn/ops/groups.py` explains the layout.
#pragma once
#include "types.cuh"

// How the rows of a product are divided, which decides what `tiles.cuh` walks over.
#define DENSE 0
#define JAGGED_M 1
#define JAGGED_K 2
#define MASKED 3

// Group `group` has tokens `start` to `stop`. Offsets that decrease, or exceed `tokens`, cause no access out of bounds.
struct Group {
    int group, start, stop;

    INLINE Group(const int* offsets, int tokens) : group(0), start(0), stop(end_of(offsets[0], 0, tokens)) {}

    // Moves to the next group; after the last of `groups`, to the tokens that are in no group.
    INLINE void advance(const int* offsets, int groups, int tokens) {
        ++group;
        start = stop;
        stop = group < groups ? end_of(offsets[group], start, tokens) : tokens;
    }

    static INLINE int end_of(int offset, int start, int tokens) { return min(max(offset, start), tokens); }
};

#ifdef SPREAD_UNIT
// Groups whose tokens are spread: rows begin at multiples of SPREAD_UNIT, and scales hold for blocks of 128 rows.
struct Spread {
    // The row at which a group, or a block of it, begins whose first token is `token`.
    static INLINE int first_row(int token, int group) { return SPREAD_UNIT * (token / SPREAD_UNIT + group); }

    // The first block of the group that begins with token `start`.
    static INLINE int first_block(int start, int group) { return start / 128 + group; }
};
#endif

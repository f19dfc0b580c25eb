// Where the groups of a grouped product lie, from their END offsets on the device; `fp8fn/ops/groups.py` says what for.
#pragma once
#include "types.cuh"

// What the rows of a product are cut into, and what `tiles.cuh` walks over.
#define DENSE 0
#define JAGGED_M 1
#define JAGGED_K 2

// Groups of tokens: `group` holds tokens `start` to `stop`. Offsets that sink or pass `tokens` make no access outside.
struct Group {
    int group, start, stop;

    INLINE Group(const int* offsets, int tokens) : group(0), start(0), stop(end_of(offsets[0], 0, tokens)) {}

    // On to the next one; past the last of `groups`, the one of the tokens that are in none.
    INLINE void advance(const int* offsets, int groups, int tokens) {
        ++group;
        start = stop;
        stop = group < groups ? end_of(offsets[group], start, tokens) : tokens;
    }

    static INLINE int end_of(int offset, int start, int tokens) { return min(max(offset, start), tokens); }
};

#ifdef SPREAD_UNIT
// Of a group whose tokens are spread: rows in multiples of SPREAD_UNIT, scales of blocks of 128.
struct Spread {
    // The row in which a group, or a block of one, begins whose first token is `token`.
    static INLINE int first_row(int token, int group) { return SPREAD_UNIT * (token / SPREAD_UNIT + group); }

    // The first block of the group that begins with token `start`.
    static INLINE int first_block(int start, int group) { return start / 128 + group; }
};
#endif

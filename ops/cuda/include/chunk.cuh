// Chunks of a panel: 128 rows of 128 bytes in shared memory, swizzled by TMA; and stores of their transposed columns.
//
// Macros: those of panel.cuh; X_LEAVES, when the L2 evicts the lines of x.
#pragma once
#include "hopper.cuh"
#include "panel.cuh"

enum class Leaves { ANY, FIRST, LAST };  // no preference, first, or last

constexpr int ROW_BYTES = 128;
constexpr int CHUNK_ROWS = 128;  // rows of a chunk, one stage of the ring
constexpr int STAGE_BYTES = CHUNK_ROWS * ROW_BYTES;
static_assert(PANEL * ELEMENT_BYTES == ROW_BYTES);

// Loads boxes of x by TMA, with the eviction policy of X_LEAVES.
struct Boxes {
    const TensorMap& x;
    uint64_t policy;

    INLINE explicit Boxes(const TensorMap& x) : x(x), policy(0) {
        if constexpr (X_LEAVES == Leaves::FIRST) policy = first_out_policy();
        if constexpr (X_LEAVES == Leaves::LAST) policy = last_out_policy();
    }

    INLINE void load(uint32_t to, uint32_t barrier, int column, int row, int matrix) const {
        if constexpr (X_LEAVES != Leaves::ANY) {
            tma_load(to, x, barrier, column, row, matrix, policy);
        } else {
            tma_load(to, x, barrier, column, row, matrix);
        }
    }
};

// Stores rows `low` to `high` of 16 bytes: whole words, and then the rest of the first and the last word byte by byte.
INLINE void store_some(uint8_t* to, uint4 out, int low, int high) {
    if (low <= 0 && high >= ROWS) {
        store16<Store::NORMAL>(to, out);
    } else if (low < ROWS && high > 0) {
        low = max(low, 0);
        high = min(high, ROWS);
        const uint32_t words[4] = {out.x, out.y, out.z, out.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (low <= 4 * w && 4 * w + 4 <= high) *reinterpret_cast<uint32_t*>(to + 4 * w) = words[w];
        }
        if ((low | high) % 4 != 0) {
#pragma unroll 1
            for (int row = low; row < high; ++row) {
                const int of_word = row / 4 * 4;
                if (low <= of_word && of_word + 4 <= high) continue;
                const uint32_t word = row < 8 ? (row < 4 ? out.x : out.y) : (row < 12 ? out.z : out.w);
                to[row] = uint8_t(word >> 8 * (row % 4));
            }
        }
    }
}

// Chunks of a panel: 128 rows of 128 bytes in shared memory as the copy engine's swizzle leaves them, stored turned around.
//
// Macros: those of panel.cuh.
#pragma once
#include "panel.cuh"

constexpr int ROW_BYTES = 128;
constexpr int CHUNK = 128;  // rows
constexpr int STAGE_BYTES = CHUNK * ROW_BYTES;
static_assert(PANEL * ELEMENT_BYTES == ROW_BYTES);

// What a lane writes of a chunk: 16 rows of one word.
struct Lane {
    int group, column;  // of the 16 rows; of the panel
    unsigned at, turn;  // of its first word in a chunk; how its rows are turned around
    float inverse[IN_WORD];

    __forceinline__ Lane(int group, int word) : group(group), column(IN_WORD * word) {
        at = group * ROWS * ROW_BYTES + (group * (ROW_BYTES + 16) ^ word / 4 * 16) + word % 4 * 4;
        turn = 0x3210 ^ group * 0x1111;
    }

    // Lanes whose rows are 16 apart read them in orders of their own, of which no two meet in a bank: at step i the row
    // i ^ group.
    __forceinline__ void load(unsigned (&words)[ROWS], const char* stage) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const char* from = stage + (at ^ i * (ROW_BYTES + 16));
            words[i] = *reinterpret_cast<const unsigned*>(from);
            words[i + 8] = *reinterpret_cast<const unsigned*>(from + 8 * ROW_BYTES);
        }
    }

    // One column of the words, of which `by(i)` is the inverse scale of word i.
    template <typename By>
    __forceinline__ uint4 quantized(const unsigned (&words)[ROWS], int place, By&& by) const {
        const auto value = [&](int i) { return element(words[i], place) * by(i); };
        unsigned packed[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) packed[w] = pack<FP8>(value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3));
        return make_uint4(__byte_perm(packed[0], packed[1], turn), __byte_perm(packed[0], packed[1], turn ^ 0x4444),
                          __byte_perm(packed[2], packed[3], turn), __byte_perm(packed[2], packed[3], turn ^ 0x4444));
    }
};

// The bits of all words, for `once_loaded`.
template <int COUNT>
__forceinline__ unsigned any_of(const unsigned (&words)[COUNT]) {
    unsigned any = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) any |= words[i];
    return any;
}

// Stores the rows `low` to `high` of 16: words that are whole, then what is left of the first and the last, row by row.
__forceinline__ void store_some(unsigned char* to, uint4 out, int low, int high) {
    if (low <= 0 && high >= ROWS) {
        store16<Store::NORMAL>(to, out);
    } else if (low < ROWS && high > 0) {
        low = max(low, 0);
        high = min(high, ROWS);
        const unsigned words[4] = {out.x, out.y, out.z, out.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (low <= 4 * w && 4 * w + 4 <= high) *reinterpret_cast<unsigned*>(to + 4 * w) = words[w];
        }
        if ((low | high) % 4 != 0) {
#pragma unroll 1
            for (int row = low; row < high; ++row) {
                const int of_word = row / 4 * 4;
                if (low <= of_word && of_word + 4 <= high) continue;
                const unsigned word = row < 8 ? (row < 4 ? out.x : out.y) : (row < 12 ? out.z : out.w);
                to[row] = static_cast<unsigned char>(word >> 8 * (row % 4));
            }
        }
    }
}

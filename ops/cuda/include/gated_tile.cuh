// Pairs of tensors of one tile of quantizers of `silu(gate) * up`: both have a maximum in each row, of 16 bits, so that
// one word and one shuffle serve both.
//
// Macros: those of fp8_tile.cuh and values.cuh.
#pragma once
#include "convert.cuh"
#include "fp8_tile.cuh"
#include "row_scatter.cuh"
#include "values.cuh"

static_assert(SIXTEEN_BITS, "maxima are pairs of 16 bits");
static_assert(ROWS <= 8, "two lanes end with a row's maximum, one for each tensor of a pair");

// The lanes with this bit have the scale of the second tensor of a pair, the others that of the first.
constexpr int SECOND = 16;

// Stores two tensors row-major, each row with a scale of its own. Scales have strides (1, lead).
template <bool WHOLE, Fp8 TYPE, Format KIND, typename Stored>
INLINE void store_pair_of_rows(PackedValues& first, PackedValues& second, uint8_t* const (&data)[2],
                               Stored* const (&scales)[2], int row_m, int64_t scale_block, Place at, int M, int N) {
    const int lane = threadIdx.x % 32;
    uint32_t amax[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const uint32_t a = first.row_words(r), b = second.row_words(r);
        // The second tensor's maximum in the upper half.
        amax[r] = __vmaxu2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
    first.pack_again();
    second.pack_again();
    int row;
    const uint32_t largest = scatter_max<LargerPair>(amax, ROW_LANES, lane, row);
    const bool upper = lane & SECOND;
    const auto scale = block_scale<TYPE, KIND>(PackedValues::widened(largest, upper));
    constexpr int SPARE = ROWS == 8 ? 0 : 4;  // lanes with these bits repeat what others have
    if (!(lane & SPARE) && (WHOLE || at.row + row < M)) {
        (upper ? scales[1] : scales[0])[scale_block + at.row + row] = scale.stored;
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const auto inverse = [&](int r) {
            const int from = (lane & OTHER_ROWS) | lane_of_item<ROWS>(r, ROW_LANES) | (which ? SECOND : 0);
            return __shfl_sync(~0u, scale.inverse, from);
        };
        PackedValues& values = which ? second : first;
        store_rows<WHOLE, TYPE>(values, inverse, data[which], row_m, at, M, N);
        values.pack_again();
    }
}

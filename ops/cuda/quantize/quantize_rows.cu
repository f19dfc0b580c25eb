// Quantizes whole rows: x (B, M, N), row-major, or silu(x) * other, to FP8 with one scale for each row, in one read and
// one launch.
//
// Decomposition. ROW_WARPS warps of a block have a row. A thread holds OCTETS octets of 8 columns of the row, 32 *
// ROW_WARPS octets apart, or their products in float32.
//
// Macros: INPUT, FP8 and FORMAT, of the enums Element, Fp8 and Format; SOURCE, PLAIN or SILU_MUL of the enum Source;
// WARPS, ROW_WARPS, OCTETS; LOAD, of the enum of instructions.cuh; EVEN, the threads' octets fill the row and the
// blocks' rows fill the matrix; PARTIAL, N is not a multiple of 8; ALIGNED, x and other load by 16 bytes.
#include "fp8_block.cuh"
#define ROWS OCTETS
#include "values.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK_ROWS = WARPS / ROW_WARPS;
constexpr bool OF_TWO = SOURCE == Source::SILU_MUL;
static_assert(WARPS % ROW_WARPS == 0, "warps of a block share no row with those of another");

using Scale = BlockScale<FORMAT>;
using Stored = StoredScale<FORMAT>::type;

// The largest magnitude of a thread's octets, as the bits of a float32.
INLINE uint32_t amax_of(const Octet (&octets)[OCTETS]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
#pragma unroll
        for (int w = 0; w < OCTET_WORDS; ++w) {
            const uint32_t word = octets[i].word[w];
            largest = SIXTEEN_BITS ? __vmaxu2(largest, word & MAGNITUDES) : max(largest, word & 0x7fffffffu);
        }
    }
    if constexpr (SIXTEEN_BITS) largest = PackedValues::widened(max(largest >> 16, largest & 0xffffu), false);
    return largest;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_rows(const void* x, const void* other, uint8_t* data, Stored* scale, int M, int N, int x_m, int other_m,
                  int data_m, int scale_lead) {
    __shared__ uint32_t warp_amax[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * BLOCK_ROWS + warp / ROW_WARPS, first = 8 * (threadIdx.x % (32 * ROW_WARPS));
    constexpr int APART = 8 * 32 * ROW_WARPS;  // columns from an octet of a thread to its next
    const int64_t layer = blockIdx.z, first_row = layer * M;
    const bool there = EVEN || row < M;

    // Load, and reduce the largest magnitude over the row's warps.
    const auto load = [&](Octet(&to)[OCTETS], const void* from, int stride) {
#pragma unroll
        for (int i = 0; i < OCTETS; ++i) {
            Octet octet[1];
            load_octets<LOAD>(octet, from, first_row, row, first + i * APART, M, N, stride);
            to[i] = octet[0];
        }
    };
    Octet octets[OCTETS];
    load(octets, x, x_m);
    [[maybe_unused]] FloatValues products;
    if constexpr (OF_TWO) {
        Octet others[OCTETS];
        load(others, other, other_m);
#pragma unroll
        for (int i = 0; i < OCTETS; ++i) {
#pragma unroll
            for (int c = 0; c < 8; ++c) products.row[i][c] = silu(octets[i].at(c)) * others[i].at(c);
        }
    }
    const auto value = [&](int i, int c) {
        if constexpr (OF_TWO) {
            return products.at(i, c);
        } else {
            return octets[i].at(c);
        }
    };
    uint32_t amax;
    if constexpr (OF_TWO) {
        amax = products.amax();
    } else {
        amax = amax_of(octets);
    }
    amax = __reduce_max_sync(~0u, amax);
    if constexpr (ROW_WARPS > 1) {
        if (lane == 0) warp_amax[warp] = amax;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < ROW_WARPS; ++w) amax = max(amax, warp_amax[warp / ROW_WARPS * ROW_WARPS + w]);
    }
    const Scale found = block_scale<FP8, FORMAT>(amax);
    if (first == 0 && there) scale[layer * scale_lead + row] = found.stored;

    // Epilogue: scale, convert, store.
    uint8_t* to = data + (first_row + row) * data_m + first;
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        if constexpr (!OF_TWO) octets[i].pack_again();
        uint32_t words[2];
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            words[w] = pack<FP8>(value(i, 4 * w) * found.inverse, value(i, 4 * w + 1) * found.inverse,
                                 value(i, 4 * w + 2) * found.inverse, value(i, 4 * w + 3) * found.inverse);
        }
        const int left = N - first - i * APART;  // columns left in the row
        if (EVEN || (there && left >= 8)) {
            store8<Store::NORMAL>(to + i * APART, make_uint2(words[0], words[1]));
        } else if (there) {
            store_bytes(to + i * APART, make_uint4(words[0], words[1], 0, 0), left);
        }
    }
}

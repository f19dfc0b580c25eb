// Quantization of a panel of columns whose rows lie in shared memory: scales from largest magnitudes, and transposed
// stores.
//
// A thread quantizes one word, one or two columns, of 16 rows, and stores 16 bytes a column. The lanes of a warp have 4
// words, 16 bytes of a row, of 8 times 16 rows, so that a column is stored in lines of 128 bytes.
//
// Macros: INPUT, FP8 and FORMAT, of the enums Element, Fp8 and Format; PANEL, columns; CLUSTER, WARPS.
#pragma once
#include "cluster.cuh"
#include "element.cuh"
#include "fp8_block.cuh"

constexpr int ELEMENT_BYTES = INPUT == Element::FP32 ? 4 : 2;
constexpr int IN_WORD = 4 / ELEMENT_BYTES;  // columns of a word
constexpr int IN_PIECE = 16 / ELEMENT_BYTES;  // columns of a piece of 16 bytes
constexpr int WORDS = PANEL / IN_WORD;  // words of a row of the panel
constexpr int PIECES = PANEL / IN_PIECE;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16;  // rows of a store
constexpr int STRIP_ROWS = 8 * ROWS;  // rows of a warp's stores
constexpr int ROWS_AT_ONCE = THREADS / PIECES;  // rows that a block loads at once, a piece a thread
constexpr int SECTOR = 32;  // bytes; each block's rows begin at a multiple, so that it writes whole sectors
static_assert(32 % PIECES == 0 && PIECES >= 4, "a warp loads whole rows");

using Scale = BlockScale<FORMAT>;
using Stored = StoredScale<FORMAT>::type;

// The element of a word, as a float. Applied to the bits of a magnitude it gives the magnitude.
INLINE float element(uint32_t word, int place) {
    if constexpr (INPUT == Element::FP32) return __uint_as_float(word);
    if constexpr (INPUT == Element::BF16) return __uint_as_float(place ? word & 0xffff0000u : word << 16);
    return half_to_float(uint16_t(place ? word >> 16 : word));
}

// The larger magnitude of each element of two words. As integers magnitudes order as floats do, NaN last.
INLINE uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (INPUT == Element::FP32) return max(a, b & 0x7fffffffu);
    return __vmaxu2(a, b & 0x7fff7fffu);
}

// The byte at which a piece of a row in shared memory lies. Rows 16 apart, of which the lanes of a warp read the same
// piece, begin in different banks.
INLINE int place_of(int row, int piece) { return (row * PIECES + piece) * 16 ^ (row & 0x70); }

// Stores bytes `begin` to `end` of 16, in words and halves as far as these are whole.
INLINE void store_span(uint8_t* to, uint4 piece, int begin, int end) {
#pragma unroll 1
    for (int at = 0; at < 16; at += 4) {
        const uint32_t word = at < 8 ? (at < 4 ? piece.x : piece.y) : (at < 12 ? piece.z : piece.w);
        if (begin <= at && at + 4 <= end) {
            *reinterpret_cast<uint32_t*>(to + at) = word;
            continue;
        }
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
            const auto two = uint16_t(word >> 8 * half);
            const bool first = begin <= at + half && at + half < end,
                       second = begin <= at + half + 1 && at + half + 1 < end;
            if (first && second) {
                *reinterpret_cast<uint16_t*>(to + at + half) = two;
            } else if (first) {
                to[at + half] = uint8_t(two);
            } else if (second) {
                to[at + half + 1] = uint8_t(two >> 8);
            }
        }
    }
}

// Shared memory of a block beside the rows. Other blocks of the cluster read `amax` of one panel while the block writes
// that of the next one.
struct alignas(16) Shared {
    uint32_t warp_amax[WARPS][WORDS];
    uint32_t amax[2][WORDS];
    float inverse[PANEL];
};

// Updates the largest magnitudes of a thread's piece.
INLINE void take_larger(uint32_t (&amax)[4], uint4 piece) {
    amax[0] = larger(amax[0], piece.x);
    amax[1] = larger(amax[1], piece.y);
    amax[2] = larger(amax[2], piece.z);
    amax[3] = larger(amax[3], piece.w);
}

// Reduces the maxima over the block, of piece `threadIdx.x % PIECES` in each thread, and shows them to the cluster.
INLINE void publish(uint32_t (&amax)[4], Shared& shared, int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int mask = PIECES; mask < 32; mask *= 2) {
#pragma unroll
        for (int w = 0; w < 4; ++w) amax[w] = larger(amax[w], __shfl_xor_sync(~0u, amax[w], mask));
    }
    if (lane < PIECES) {
        *reinterpret_cast<uint4*>(&shared.warp_amax[warp][4 * lane]) = make_uint4(amax[0], amax[1], amax[2], amax[3]);
    }
    __syncthreads();
    if (threadIdx.x < WORDS) {
        uint32_t largest = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = larger(largest, shared.warp_amax[w][threadIdx.x]);
        shared.amax[turn][threadIdx.x] = largest;
    }
    cluster_arrive<CLUSTER>(32 * warp < WORDS);
}

// Reduces the maxima over the cluster and puts the inverse scales into shared memory. The first `columns` scales are
// stored at `scale`, unless it is null.
INLINE void find_scales(Shared& shared, int turn, int rank, Stored* scale, int columns) {
    cluster_wait<CLUSTER>();
    if (threadIdx.x < WORDS) {
        const uint32_t* of_block = &shared.amax[turn][threadIdx.x];
        uint32_t largest = *of_block;
#pragma unroll
        for (int other = 1; other < CLUSTER; ++other) {
            largest = larger(largest, load_of_block(of_block, (rank + other) % CLUSTER));
        }
#pragma unroll
        for (int place = 0; place < IN_WORD; ++place) {
            const int column = IN_WORD * threadIdx.x + place;
            const Scale found = block_scale<FP8, FORMAT>(__float_as_uint(element(largest, place)));
            shared.inverse[column] = found.inverse;
            if (scale != nullptr && column < columns) scale[column] = found.stored;
        }
    }
    __syncthreads();
}

// Quantizes rows `low` to `high` in shared memory and stores up to `columns` columns; row 0 of column 0 goes to `data`.
// Stores zeros if `none`: the rows are in no group.
INLINE void store_rows(const char* rows, int low, int high, const float* inverse, uint8_t* data, int data_n,
                       int columns, bool none) {
    const int lane = threadIdx.x % 32;
    const int items = (high + STRIP_ROWS - 1) / STRIP_ROWS * PIECES;
    for (int item = threadIdx.x / 32; item < items; item += WARPS) {
        const int piece = item % PIECES, row = item / PIECES * STRIP_ROWS + lane / 4 * ROWS;
        if (row >= high) continue;
        // Rows that share a line of 128 bytes are permuted within the line, in each line in the same way.
        constexpr int OF_LINE = PIECES < 8 ? 8 / PIECES : 1;
        const uint32_t* at[OF_LINE];
#pragma unroll
        for (int i = 0; i < OF_LINE; ++i) {
            at[i] = reinterpret_cast<const uint32_t*>(rows + place_of(row + i, piece)) + lane % 4;
        }
        uint32_t words[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) words[i] = at[i % OF_LINE][i / OF_LINE * OF_LINE * WORDS];
        const int word = 4 * piece + lane % 4;
#pragma unroll
        for (int place = 0; place < IN_WORD; ++place) {
            const int column = IN_WORD * word + place;
            const float by = inverse[column];
            uint32_t packed[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                packed[w] = pack<FP8>(element(words[4 * w], place) * by, element(words[4 * w + 1], place) * by,
                                      element(words[4 * w + 2], place) * by, element(words[4 * w + 3], place) * by);
            }
            const uint4 out = none ? make_uint4(0, 0, 0, 0) : make_uint4(packed[0], packed[1], packed[2], packed[3]);
            if (column >= columns) continue;
            uint8_t* to = data + int64_t(column) * data_n + row;
            if (row >= low && row + ROWS <= high) {
                store16<Store::NORMAL>(to, out);
            } else {
                store_span(to, out, low - row, high - row);
            }
        }
    }
}

// A tile of FP8 values, TILE_M x 128, that a block of threads has in registers: stores by rows, and by columns through
// shared memory.
//
// A thread has 8 columns of ROWS consecutive rows. Half a warp spans the 128 columns.
//
// Macros: WARPS, ROWS, ROW_BYTES and STORE as in quantize.cu.
#pragma once
#include "fp8_block.cuh"

constexpr int TILE_N = 128;
constexpr int TILE_M = 2 * WARPS * ROWS;
constexpr int THREADS = 32 * WARPS;
constexpr int LINE = 128;  // bytes of a row or column of a tile in FP8
constexpr int PIECE = 16;  // bytes of a store

// The bits of a lane's number that distinguish the lanes of a row; bit 8 distinguishes the two rows of a warp. So 8
// neighbouring lanes load 128 bytes, and 16 of them store to `turned` without bank conflicts.
__device__ constexpr int ROW_LANES[4] = {1, 2, 4, 16};
constexpr int OTHER_ROWS = 8;

struct Place {
    int octet;  // among the octets of the tile's columns
    int group;  // among the tile's groups of ROWS rows
    int row, column;  // the thread's first, in the matrix
};

// Stores a piece of which `inside` bytes lie in the matrix.
template <bool WHOLE>
INLINE void store_piece(uint8_t* to, uint4 piece, int inside) {
    if (WHOLE || inside >= PIECE) {
        store16<STORE>(to, piece);
    } else {
        store_bytes(to, piece, inside);
    }
}

// Stores the thread's values row-major, each row scaled by its own inverse scale.
template <bool WHOLE, Fp8 TYPE, typename Values, typename Inverse>
INLINE void store_rows(const Values& values, Inverse inverse, uint8_t* out, int row_m, Place at, int M, int N) {
    uint8_t* to = out + int64_t(at.row) * row_m + at.column;
    const bool odd = at.octet & 1;
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
        uint32_t words[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float by = inverse(r + i);
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                words[i][w] = pack<TYPE>(values.at(r + i, 4 * w) * by, values.at(r + i, 4 * w + 1) * by,
                                         values.at(r + i, 4 * w + 2) * by, values.at(r + i, 4 * w + 3) * by);
            }
        }
        if constexpr (ROW_BYTES == 16) {
            // Two neighbouring lanes exchange halves: the even one stores row r of both, the odd one row r + 1.
            uint32_t theirs[2], mine[2];
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                theirs[w] = __shfl_xor_sync(~0u, odd ? words[0][w] : words[1][w], 1);
                mine[w] = odd ? words[1][w] : words[0][w];
            }
            const uint4 piece = odd ? make_uint4(theirs[0], theirs[1], mine[0], mine[1])
                                    : make_uint4(mine[0], mine[1], theirs[0], theirs[1]);
            const int row = r + odd, back = odd ? 8 : 0;
            if (WHOLE || at.row + row < M) {
                store_piece<WHOLE>(to + int64_t(row) * row_m - back, piece, N - at.column + back);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint8_t* address = to + int64_t(r + i) * row_m;
                if (WHOLE || (at.row + r + i < M && at.column + 8 <= N)) {
                    store8<STORE>(address, make_uint2(words[i][0], words[i][1]));
                } else if (at.row + r + i < M) {
                    store_bytes(address, make_uint4(words[i][0], words[i][1], 0, 0), N - at.column);
                }
            }
        }
    }
}

// The transposed tile in FP8 in shared memory, the pieces of a column swizzled.
using Turned = uint4[TILE_N][LINE / PIECE];

// Writes the thread's values to the transposed tile, each column scaled by its own inverse scale.
template <Fp8 TYPE, typename Values>
INLINE void turn(const Values& values, const float (&inverse)[8], Turned& turned, Place at) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        uint32_t words[ROWS / 4];
#pragma unroll
        for (int w = 0; w < ROWS / 4; ++w) {
            words[w] = pack<TYPE>(values.at(4 * w, c) * inverse[c], values.at(4 * w + 1, c) * inverse[c],
                                  values.at(4 * w + 2, c) * inverse[c], values.at(4 * w + 3, c) * inverse[c]);
        }
        // Columns 8 apart, which neighbouring lanes have, begin in different banks.
        const int byte = ROWS * at.group;
        auto* to = reinterpret_cast<uint8_t*>(&turned[8 * at.octet + c][byte / PIECE ^ (at.octet & 7)]) + byte % PIECE;
        if constexpr (ROWS == 4) *reinterpret_cast<uint32_t*>(to) = words[0];
        if constexpr (ROWS == 8) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        if constexpr (ROWS == 16) *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Stores the transposed tile column-major. With SPREAD, only the first `tokens` rows hold values, and zeros follow.
template <bool WHOLE, bool SPREAD>
INLINE void store_turned(const Turned& turned, uint8_t* out, int col_n, int tile_m, int tile_n, int M, int N,
                         [[maybe_unused]] int tokens) {
    constexpr int PIECES = LINE / PIECE;
#pragma unroll
    for (int i = threadIdx.x; i < TILE_N * PIECES; i += THREADS) {
        const int column = i / PIECES, piece = i % PIECES;
        if (WHOLE || (tile_n + column < N && tile_m + PIECE * piece < M)) {
            uint4 bytes = turned[column][piece ^ (column / 8 & 7)];
            // Rows without a token hold zeros, which a NaN scale made NaN, or were not written: store zeros.
            if constexpr (SPREAD && !WHOLE) bytes = first_bytes(bytes, tokens - PIECE * piece);
            store_piece<WHOLE>(out + int64_t(tile_n + column) * col_n + tile_m + PIECE * piece, bytes,
                               SPREAD ? PIECE : M - tile_m - PIECE * piece);
        }
    }
}

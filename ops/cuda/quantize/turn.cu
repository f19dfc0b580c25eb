// Bytes of x (B, M, N), whose rows are contiguous, copied to out, whose columns are.
//
// Decomposition. A block of threads turns a tile of 128 x 256 bytes, a thread 16 rows of 16 columns: it loads a piece of
// each row, transposes in registers, and stores a piece of each column. Eight neighbouring threads take rows below each
// other, so that a warp loads 64 bytes of a row and stores 128 of a column.
//
// Rows of x and columns of out begin at multiples of 16 bytes.
//
// Macros: EVEN (whole tiles).
#include "instructions.cuh"
#include "turn_bytes.cuh"

constexpr int PIECE = 16;  // bytes
constexpr int THREADS = 128, LANES = 8;
constexpr int TILE_M = PIECE * LANES, TILE_N = PIECE * THREADS / LANES;
constexpr int BLOCKS = 5;  // that a multiprocessor has registers for

// Bytes from `column` on of a row of N; those past the end are 0.
template <bool WHOLE>
INLINE uint4 load_piece(const uint8_t* row, int column, int N) {
    if (WHOLE || column + PIECE <= N) return load16<Load::CACHED>(row + column);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        if (column + i < N) words[i / 4] |= uint32_t(row[column + i]) << (8 * (i % 4));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Stores bytes from `row` on of a column of M.
template <bool WHOLE>
INLINE void store_piece(uint8_t* column, int row, int M, const uint32_t (&words)[4]) {
    if (WHOLE || row + PIECE <= M) {
        store16<Store::NORMAL>(column + row, make_uint4(words[0], words[1], words[2], words[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        if (row + i < M) column[row + i] = uint8_t(words[i / 4] >> (8 * (i % 4)));
    }
}

template <bool WHOLE>
INLINE void turn_piece(const uint8_t* x, uint8_t* out, int row, int column, int M, int N, int64_t x_m, int64_t out_n) {
    uint32_t rows[PIECE][4];
#pragma unroll
    for (int r = 0; r < PIECE; ++r) {
        const uint4 piece =
            WHOLE || row + r < M ? load_piece<WHOLE>(x + (row + r) * x_m, column, N) : make_uint4(0, 0, 0, 0);
        rows[r][0] = piece.x, rows[r][1] = piece.y, rows[r][2] = piece.z, rows[r][3] = piece.w;
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        uint32_t columns[4][4];  // four columns beside each other, of 16 rows
#pragma unroll
        for (int four = 0; four < 4; ++four) {
            uint32_t turned[4];
            turn_bytes(rows[4 * four][word], rows[4 * four + 1][word], rows[4 * four + 2][word],
                       rows[4 * four + 3][word], turned);
#pragma unroll
            for (int c = 0; c < 4; ++c) columns[c][four] = turned[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int n = column + 4 * word + c;
            if (WHOLE || n < N) store_piece<WHOLE>(out + n * out_n, row, M, columns[c]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    turn(const void* x, void* out, int M, int N, int x_m, int out_n) {
    const int tile_m = blockIdx.y * TILE_M, tile_n = blockIdx.x * TILE_N;
    const int row = tile_m + PIECE * (threadIdx.x % LANES), column = tile_n + PIECE * (threadIdx.x / LANES);
    const uint8_t* const from = static_cast<const uint8_t*>(x) + int64_t(blockIdx.z) * M * x_m;
    uint8_t* const to = static_cast<uint8_t*>(out) + int64_t(blockIdx.z) * N * out_n;
    if (EVEN || (tile_m + TILE_M <= M && tile_n + TILE_N <= N)) {
        turn_piece<true>(from, to, row, column, M, N, x_m, out_n);
    } else if (row < M && column < N) {
        turn_piece<false>(from, to, row, column, M, N, x_m, out_n);
    }
}

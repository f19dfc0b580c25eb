// Few rows by an FP8 weight: out (B, M, N) = x (B, M, K) · (w (B, K, N) * w_scale) + bias, x of 16 bits.
//
// The product is bound by the bytes of the weight: each is read once for ROWS rows of x, in pieces of 16 bytes, and
// many loads are in flight before one is used. A warp computes the product transposed, by mma.sync: columns of w,
// widened in registers, are the rows of the left operand, and rows of x, from shared memory, the columns of the right
// one. The order of K within a product is free as long as both operands have the same order, so a thread takes
// consecutive bytes as they lie in memory.
//
// Decomposition. A block has BN columns of w: WARPS_N warps lie side by side, WARPS_K warps share K, and so do the
// CLUSTER blocks of a cluster. A warp goes through units of K. With K contiguous a unit is 64 deep and 16 columns wide
// in each of TILES tiles: a thread holds 16 bytes of two columns of each tile. With N contiguous it is 32 deep and 128
// columns wide: a thread holds 16 columns of 8 lines, which it transposes; columns i and i + 8 of every thread's 16
// make tile i. UNROLL units are in flight. All sums are added in a fixed order: those of warps in shared memory, those
// of blocks in the block that stores them.
//
// Overlap. The kernel uses programmatic dependent launch, and prefetches the weight to the L2 before it waits.
//
// Shared memory: x (ROWS, X_PITCH), K_CHUNK of K at a time, a multiple of 128; after the main loop the sums (WARPS_K,
// rows, PITCH) overwrite x; other blocks' sums arrive from byte `received` on.
//
// Macros: INPUT (BF16, FP16), OUT and BIAS of the enum Element; FP8 of the enum Fp8; K_CONTIGUOUS, EVEN_K (K is a
// multiple of 16), X_PIECES (x loads by 16 bytes); SCALE (LINE, VECTOR, BLOCK: see scale_kinds.cuh); ROWS (a multiple
// of 8), TILES, WARPS_N, WARPS_K, UNROLL, CLUSTER, K_CHUNK, RESIDENT (blocks a multiprocessor).
#include "a16w8.cuh"
#include "few_rows.cuh"
#include "turn_bytes.cuh"

constexpr int UNIT = K_CONTIGUOUS ? 64 : 32;  // of K
constexpr int DEPTH = UNIT / 4;  // of K, for each thread
constexpr int PIECES = K_CONTIGUOUS ? 2 * TILES : 8;  // of 16 bytes, of a unit, for each thread
constexpr int SCALES = SCALE == VECTOR ? 2 * TILES : 1;
// Rows of x are padded so that eight threads, four of each of two rows, read 128 bytes from all banks.
constexpr int X_PITCH = K_CHUNK * 2 + (K_CONTIGUOUS ? 16 : 64);  // bytes
static_assert(128 % COLUMNS == 0, "columns of a warp have one scale of a block");
static_assert(K_CONTIGUOUS || TILES == 8, "16 bytes of 8 threads");

struct Unit {
    uint4 piece[PIECES];
    float scale[SCALES];
};

// Loads the right operand: row `group` of every slice of x, from byte `at` of the row on.
INLINE void load_rows(uint32_t (&b)[SLICES][DEPTH / 2], const char* memory, int pitch, int rows, int group, int at) {
    // Rows past the last hold arbitrary values: they are columns of the product that nobody stores.
    const char* const first = memory + (ROWS > 8 ? group : min(group, rows - 1)) * pitch + at;
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
        const char* from = first + 8 * s * pitch;
#pragma unroll
        for (int i = 0; i < DEPTH / 8; ++i) {
            const uint4 values = reinterpret_cast<const uint4*>(from)[i];
            b[s][4 * i] = values.x, b[s][4 * i + 1] = values.y, b[s][4 * i + 2] = values.z, b[s][4 * i + 3] = values.w;
        }
    }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, RESIDENT)
    gemv_a16w8(const uint16_t* x, const uint8_t* w, const float* w_scale, const BiasType* bias, OutType* out, int M,
               int N, int K, int received, int x_batch, int x_m, int x_k, int w_batch, int w_line, int s_batch, int s_k,
               int s_n, int bias_batch, int bias_n) {
    let_next_begin();
    if constexpr (CLUSTER > 1) cluster_arrive();
    char* const memory = block_memory();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = lane / 4, quarter = lane % 4;  // the fragments' rows and columns
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int tile_n = blockIdx.x / CLUSTER * BN, first_m = blockIdx.y * ROWS, batch = blockIdx.z;
    const int rows = min(M - first_m, ROWS);
    const int first_n = tile_n + warp_n * COLUMNS;

    // Column `half` (0 or 1) of the thread in a tile; with N contiguous the 16 columns of a thread are consecutive.
    auto column = [&](int tile, int half) {
        return first_n + (K_CONTIGUOUS ? 16 * tile + 8 * half + group : 16 * group + 8 * half + tile);
    };
    x += int64_t(batch) * x_batch + int64_t(first_m) * x_m;
    w_scale += int64_t(batch) * s_batch;
    const int64_t step = int64_t(K_CONTIGUOUS ? 8 : 1) * w_line;  // bytes from a piece of a unit to the next
    const uint8_t* const matrix = w + int64_t(batch) * w_batch;
    w = matrix + (K_CONTIGUOUS ? int64_t(column(0, 0)) * w_line + quarter * DEPTH
                               : int64_t(quarter * DEPTH) * w_line + column(0, 0));
    [[maybe_unused]] const float* const block_scale = w_scale + int64_t(first_n / 128) * s_n;

    const uint32_t units = (K + UNIT - 1) / UNIT;
    const int block_start = units * rank / CLUSTER, block_stop = units * (rank + 1) / CLUSTER;

    // Prologue: prefetch the block's part of the weight to the L2, line by line, before the wait.
    if constexpr (K_CONTIGUOUS) {
        const int k = block_start * UNIT, bytes = (min(block_stop * UNIT, K) - k) & ~15;
        for (int n = threadIdx.x; n < min(BN, N - tile_n) && bytes > 0; n += THREADS)
            prefetch(matrix + int64_t(tile_n + n) * w_line + k, bytes);
    } else {
        const int bytes = min(BN, N - tile_n) & ~15;
        for (int k = block_start * UNIT + threadIdx.x; k < min(block_stop * UNIT, K) && bytes > 0; k += THREADS)
            prefetch(matrix + int64_t(k) * w_line + tile_n, bytes);
    }
    wait_for_launches();

    // Loads unit `index` of the weight and its scales; zeros from unit `stop` on and outside of the matrix.
    auto load = [&](Unit& unit, int index, int stop) {
        const int k = index * UNIT + quarter * DEPTH, room = min(stop * UNIT, K) - k;
        const uint8_t* from = w + int64_t(index) * (K_CONTIGUOUS ? UNIT : UNIT * int64_t(w_line));
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            uint4& piece = unit.piece[i];
            const bool inside =
                (K_CONTIGUOUS ? column(i / 2, i % 2) : column(0, 0)) < N && room > (K_CONTIGUOUS ? 0 : i);
            piece = inside ? load_ahead(from + i * step) : make_uint4(0, 0, 0, 0);
            if constexpr (K_CONTIGUOUS && !EVEN_K) piece = first_bytes(piece, room);
        }
        [[maybe_unused]] const int64_t along_k = int64_t(uint32_t(index) * UNIT / 128) * s_k;
        if constexpr (SCALE == BLOCK) unit.scale[0] = first_n < N && index < stop ? __ldg(block_scale + along_k) : 0.0f;
        if constexpr (SCALE == VECTOR) {
#pragma unroll
            for (int i = 0; i < SCALES; ++i) {
                const int n = column(i / 2, i % 2);
                unit.scale[i] = n < N && index < stop ? __ldg(w_scale + along_k + int64_t(n) * s_n) : 0.0f;
            }
        }
    };

    float acc[TILES][SLICES][4] = {};

    // acc += scale * (a · b), for one tile of a unit.
    auto accumulate = [&](int tile, const Unit& unit, const uint32_t (&a)[DEPTH / 4][4],
                          const uint32_t (&b)[SLICES][DEPTH / 2]) {
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            float (&sum)[4] = acc[tile][s];
            if constexpr (SCALE == LINE) {
#pragma unroll
                for (int j = 0; j < DEPTH / 4; ++j) mma<XType>(sum, a[j], b[s][2 * j], b[s][2 * j + 1]);
            } else {
                float d[4] = {};
#pragma unroll
                for (int j = 0; j < DEPTH / 4; ++j) mma<XType>(d, a[j], b[s][2 * j], b[s][2 * j + 1]);
                const float upper = unit.scale[SCALE == VECTOR ? 2 * tile : 0];
                const float lower = unit.scale[SCALE == VECTOR ? 2 * tile + 1 : 0];
                sum[0] += upper * d[0];
                sum[1] += upper * d[1];
                sum[2] += lower * d[2];
                sum[3] += lower * d[3];
            }
        }
    };
    // Widens a unit and multiplies it by x, from element `at` of the chunk of x on.
    auto multiply = [&](const Unit& unit, int at) {
        uint32_t b[SLICES][DEPTH / 2];
        load_rows(b, memory, X_PITCH, rows, group, (at + quarter * DEPTH) * 2);
        uint32_t a[DEPTH / 4][4];
        if constexpr (K_CONTIGUOUS) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int j = 0; j < DEPTH / 4; ++j) {
                    widen<XType, FP8>(word(unit.piece[2 * tile % PIECES], j), a[j][0], a[j][2]);
                    widen<XType, FP8>(word(unit.piece[(2 * tile + 1) % PIECES], j), a[j][1], a[j][3]);
                }
                accumulate(tile, unit, a, b);
            }
        } else {
#pragma unroll
            for (int quad = 0; quad < 2; ++quad) {  // four tiles, whose columns are in two words of a piece
                uint32_t turned[2][DEPTH / 4][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int j = 0; j < DEPTH / 4; ++j) {
                        auto line = [&](int i) { return word(unit.piece[(4 * j + i) % PIECES], quad + 2 * half); };
                        turn_bytes(line(0), line(1), line(2), line(3), turned[half][j]);
                    }
                }
#pragma unroll
                for (int c = 0; c < 4; ++c) {
#pragma unroll
                    for (int j = 0; j < DEPTH / 4; ++j) {
                        widen<XType, FP8>(turned[0][j][c], a[j][0], a[j][2]);
                        widen<XType, FP8>(turned[1][j][c], a[j][1], a[j][3]);
                    }
                    accumulate((4 * quad + c) % TILES, unit, a, b);
                }
            }
        }
    };

    // Main loop, over chunks of x.
    for (int first = block_start; first < block_stop; first += K_CHUNK / UNIT) {
        const int count = min(K_CHUNK / UNIT, block_stop - first);
        if (first > block_start) __syncthreads();  // the chunk before was read
        Unit flight[UNROLL];
        const int start = first + count * warp_k / WARPS_K, stop = first + count * (warp_k + 1) / WARPS_K;
        // x, with zeros from K to the end of the last unit. Its loads are issued first: they would else queue behind
        // the weight's.
        const int first_k = first * UNIT, pieces = count * UNIT / 8;
#pragma unroll 1
        for (int piece = threadIdx.x; piece < pieces; piece += THREADS) {
            const int k = first_k + 8 * piece;
            const uint16_t* from = x + int64_t(k) * x_k;
            char* to = memory + 16 * piece;
            const int room = max(min(K - k, 8), 0);
#pragma unroll 4
            for (int row = 0; row < rows; ++row, from += x_m, to += X_PITCH) {
#if X_PIECES
                copy16(to, room > 0 ? from : x, room * 2);
#else
                uint32_t pairs[4];
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    const uint32_t low = 2 * p < room ? __ldg(from + int64_t(2 * p) * x_k) : 0;
                    const uint32_t high = 2 * p + 1 < room ? __ldg(from + int64_t(2 * p + 1) * x_k) : 0;
                    pairs[p] = low | high << 16;
                }
                *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
            }
        }
        end_copies();
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) load(flight[i], start + i, stop);
        if (pieces > 0) wait_for_copies();  // always true, or the compiler moves the loads below it
        __syncthreads();
        for (int index = start; index < stop; index += UNROLL) {
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (index + i < stop) multiply(flight[i], (index + i - first) * UNIT);
                load(flight[i], index + i + UNROLL, stop);
            }
        }
    }

    // Epilogue: put the warps' sums (WARPS_K, rows, PITCH) over x.
    float* const sums = reinterpret_cast<float*>(memory);
    __syncthreads();
    if constexpr (K_CONTIGUOUS) {
        put_sums(sums, acc, rows, warp_k, quarter, tile_n, column);
    } else {
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int row = 8 * s + 2 * quarter + odd;
                if (row >= rows) continue;
                float4* to = reinterpret_cast<float4*>(sums + (warp_k * rows + row) * PITCH - tile_n + column(0, 0));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    auto sum = [&](int c) { return acc[(i % 2 * 4 + c) % TILES][s][odd + i / 2 * 2]; };
                    to[i] = make_float4(sum(0), sum(1), sum(2), sum(3));
                }
            }
        }
    }
    __syncthreads();

    out += (int64_t(batch) * M + first_m) * N;
    // Reduce over warps and the cluster; scale, add the bias and store a pair of columns at a time. Pairs are counted
    // along the rows of the tile.
    auto finish = [&](int pair, float2 sums) {
        const int row = pair / (BN / 2), n = tile_n + pair % (BN / 2) * 2;
        if (n >= N) return;
        float left = sums.x, right = sums.y;
        [[maybe_unused]] const bool both = n + 1 < N;
#if SCALE == LINE
        left *= __ldg(w_scale + int64_t(n) * s_n);
        right *= both ? __ldg(w_scale + int64_t(n + 1) * s_n) : 0.0f;
#endif
        if constexpr (HAS_BIAS) {
            const BiasType* biases = bias + int64_t(batch) * bias_batch;
            left += float(biases[int64_t(n) * bias_n]);
            right += both ? float(biases[int64_t(n + 1) * bias_n]) : 0.0f;
        }
        store_pair(out + int64_t(row) * N + n, left, right, N - n);
    };
    add_sums(memory, rows, received, rank, finish);
}

// Few rows by an MX-FP8 weight: out (B, M, N) = a (B, M, K) · b (B, K, N) + bias, where each operand has an e8m0 scale
// for 32 elements along K.
//
// Decomposition: as in `gemv_a16w8.cu` with K contiguous. Both operands stay FP8, a in shared memory and b in
// registers. A product covers one block of 32, from zero, and its result, times the scale of b and then the scale of a,
// is added in float32: the product of the two scales may be Inf where the result is not. Lanes exchange halves of their
// 16 bytes, so that the four lanes of a column have 8 bytes each of the same block.
//
// Four warps that lie side by side (TOGETHER) multiply by wgmma, which reads a once for 64 columns; Hopper keeps
// about 14 bits of a sum within one wgmma. Else each warp multiplies by mma.sync, which Hopper has for 16 bits only:
// FP8 values are exact in float16.
//
// ROUTED: the rows are those of tokens, whose `ids` come in tiles of `block_m` with one expert, a matrix of b. Row id /
// a_div of a becomes row id of out, times a weight. Blocks of tiles past the last, or without an expert, exit at once.
//
// Overlap. The kernel uses programmatic dependent launch. Before it waits each block prefetches at most `prefetched`
// bytes of each column of b to the L2, so that the prefetches of all resident blocks fit there.
//
// Shared memory: a, K_CHUNK of K at a time, in blocks of A_BLOCK bytes, and from A_SCALES on its scales as float32;
// after the main loop the sums (WARPS_K, rows, PITCH) overwrite both; other blocks' sums arrive from byte `received`
// on.
//
// Macros: A_FP8 and B_FP8 of the enum Fp8 (also the types of the generated `wgmma`, which has ROWS columns), OUT and
// BIAS of the enum Element; EVEN_K (K is a multiple of 16), ROUTED, ROWS (8, 16, 32, 64; up to 32 if ROUTED), TILES,
// WARPS_N, WARPS_K, UNROLL, AHEAD (pieces of a in flight a thread), CLUSTER, K_CHUNK, RESIDENT (blocks a
// multiprocessor).
#include "few_rows.cuh"

constexpr int UNIT = 64;  // of K: two blocks of 32
constexpr int DEPTH = 16;  // of K, for each thread: half a block
constexpr int PIECES = 2 * TILES;  // of 16 bytes, of a unit, for each thread
constexpr int A_PIECES = K_CHUNK / 16;  // of 16 bytes, in a row of a in shared memory
// A block of a: for every eight rows the first of each thread's two words, 16 bytes a row, then the second. Blocks are
// padded so that the pieces of one row are written to different banks.
constexpr int A_BLOCK = ROWS * 32 + 16;  // bytes
// The offset of the scales of a: for each unit and pair of rows the scales of both blocks.
constexpr int A_SCALES = K_CHUNK / 32 * A_BLOCK;
constexpr bool TOGETHER = WARPS_N % 4 == 0;
constexpr int PRODUCTS = ROWS > 32 ? 1 : 2;  // in flight a warpgroup: as many results as the registers have room for
static_assert(!ROUTED || ROWS <= 32, "a lane for each id");

struct Unit {
    uint4 piece[PIECES];
    uint32_t scale[PIECES];  // e8m0, as stored
};

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, RESIDENT)
    gemv_mx(const uint8_t* a, const uint8_t* a_scale, const uint8_t* b, const uint8_t* b_scale, const BiasType* bias,
            OutType* out, const int* sorted_token_ids, const int* expert_ids, const int* num_tokens_post_padded,
            const float* token_weights, int M, int N, int K, int received, int prefetched, int a_batch, int a_m,
            int as_batch, int as_m, int as_k, int b_batch, int b_n, int bs_batch, int bs_k, int bs_n, int experts,
            int block_m, int a_div) {
    let_next_begin();
    char* const memory = block_memory();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so that the compiler knows that a warp branches as one
    const int lane = threadIdx.x % 32;
    const int group = lane / 4, quarter = lane % 4;  // the fragments' rows and columns
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int tile_n = blockIdx.x / CLUSTER * BN;
    const int first_n = tile_n + warp_n * COLUMNS;

#if ROUTED
    wait_for_launches();  // the launch before may write the routing
    const int parts = (block_m + ROWS - 1) / ROWS, tile = blockIdx.y / parts, within = blockIdx.y % parts * ROWS + lane;
    const bool exists = lane < ROWS && within < block_m;
    const int id = exists ? __ldg(sorted_token_ids + int64_t(tile) * block_m + within) : -1;
    const int matrix = __ldg(expert_ids + tile);
    if (int64_t(tile) * block_m >= __ldg(num_tokens_post_padded) || matrix < 0 || matrix >= experts) return;
    const bool valid = id >= 0 && id < M;
    const int rows = __reduce_max_sync(~0u, valid ? lane + 1 : 0);
    if (rows == 0) return;
    __shared__ int ids[ROWS];  // -1 where there is none
    if (threadIdx.x < ROWS) ids[lane] = valid ? id : -1;
    __syncthreads();
    auto source = [&](int row) { return ids[row] < 0 ? -1 : ids[row] / a_div; };
#else
    const int first_m = blockIdx.y * ROWS, matrix = blockIdx.z, rows = min(M - first_m, ROWS);
    a += int64_t(matrix) * a_batch;
    a_scale += int64_t(matrix) * as_batch;
    auto source = [&](int row) { return first_m + row; };
#endif
    if constexpr (CLUSTER > 1) cluster_arrive();
    b += int64_t(matrix) * b_batch;
    b_scale += int64_t(matrix) * bs_batch;

    // Column `half` (0 or 1) of the thread in a tile.
    auto column = [&](int tile, int half) { return first_n + 16 * tile + 8 * half + group; };

    const uint32_t units = (K + UNIT - 1) / UNIT;
    const int block_start = units * rank / CLUSTER, block_stop = units * (rank + 1) / CLUSTER;
    // Prologue: prefetch the block's part of b and its scales to the L2.
    {
        const int k = block_start * UNIT, stop = min(min(block_stop * UNIT, K), k + prefetched), bytes = stop - k & ~15;
        const int along_k = bytes > 0 ? (stop - k + 31) / 32 : 0, columns = min(BN, N - tile_n);
        for (int n = threadIdx.x; n < columns && bytes > 0; n += THREADS)
            prefetch(b + int64_t(tile_n + n) * b_n + k, bytes);
        // Scales are prefetched where those of a column, or those of a block along K, are consecutive bytes.
        const int lines = bs_k == 1 ? columns : bs_n == 1 ? along_k : 0;
        const uint8_t* const first = b_scale + int64_t(tile_n) * bs_n + int64_t(k / 32) * bs_k;
        for (int line = threadIdx.x; line < lines; line += THREADS)
#pragma unroll 1
            for (int i = 0; i < (bs_k == 1 ? along_k : columns); i += 32)
                prefetch_line(first + int64_t(line) * (bs_k == 1 ? bs_n : bs_k) + i);
    }
#if !ROUTED
    wait_for_launches();
#endif

    // Addresses of the pieces and scales of the next unit.
    const uint8_t* piece_at[PIECES];
    const uint8_t* scale_at[PIECES];
    auto load = [&](Unit& unit, int index, int stop) {
        const int room = min(stop * UNIT, K) - index * UNIT - quarter * DEPTH, of_block = room + quarter % 2 * DEPTH;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const bool exists = column(i / 2, i % 2) < N;
            unit.piece[i] = exists && room > 0 ? load_ahead(piece_at[i]) : make_uint4(0, 0, 0, 0);
            unit.scale[i] = exists && of_block > 0 ? load_byte_ahead(scale_at[i]) : 0;
            if constexpr (!EVEN_K) unit.piece[i] = first_bytes(unit.piece[i], room);
            piece_at[i] += UNIT;
            scale_at[i] += int64_t(2) * bs_k;
        }
    };

    float acc[TILES][SLICES][4] = {};

    // Multiplies a unit of b by unit `at` of the chunk of a.
    auto multiply = [&](const Unit& unit, int at) {
        const char* const here = memory + at * 2 * A_BLOCK;
        const float4* const a_scales = reinterpret_cast<const float4*>(memory + A_SCALES) + at * (ROWS / 2) + quarter;
        const bool upper = quarter >= 2;  // the thread has half of the second block
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            uint32_t left[2][4];  // fragments, for each block
            float scale[2][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4& piece = unit.piece[2 * tile + half];
                const uint32_t low = __shfl_xor_sync(~0u, upper ? piece.x : piece.z, 2);
                const uint32_t high = __shfl_xor_sync(~0u, upper ? piece.y : piece.w, 2);
                left[0][half] = upper ? low : piece.x, left[0][half + 2] = upper ? high : piece.y;
                left[1][half] = upper ? piece.z : low, left[1][half + 2] = upper ? piece.w : high;
                const float mine = scale_of(unit.scale[2 * tile + half]), other = __shfl_xor_sync(~0u, mine, 2);
                scale[0][half] = upper ? other : mine, scale[1][half] = upper ? mine : other;
            }
            auto add = [&](int block, int s, const float* d) {
                const float4 of_rows = a_scales[4 * s];
                const float even = block == 0 ? of_rows.x : of_rows.z, odd = block == 0 ? of_rows.y : of_rows.w;
                float (&sum)[4] = acc[tile][s];
                sum[0] += d[0] * scale[block][0] * even;
                sum[1] += d[1] * scale[block][0] * odd;
                sum[2] += d[2] * scale[block][1] * even;
                sum[3] += d[3] * scale[block][1] * odd;
            };
            if constexpr (TOGETHER) {
                float d[PRODUCTS][ROWS / 2];
#pragma unroll
                for (int block = 0; block < 2; ++block) {
                    float (&mine)[ROWS / 2] = d[block % PRODUCTS];
                    fence_registers(mine);
                    wgmma_fence();
                    wgmma(mine, left[block], descriptor_of_matrices(here + block * A_BLOCK), 0);
                    wgmma_commit();
                    fence_registers(mine);
                    if constexpr (PRODUCTS == 1) {
                        wgmma_wait<0>();
                        fence_registers(mine);
#pragma unroll
                        for (int s = 0; s < SLICES; ++s) add(block, s, mine + 4 * s);
                    }
                }
                if constexpr (PRODUCTS == 2) {
                    wgmma_wait<1>();
                    fence_registers(d[0]);
#pragma unroll
                    for (int s = 0; s < SLICES; ++s) add(0, s, d[0] + 4 * s);
                    wgmma_wait<0>();
                    fence_registers(d[1]);
#pragma unroll
                    for (int s = 0; s < SLICES; ++s) add(1, s, d[1] + 4 * s);
                }
            } else {
                uint32_t wide[2][2][4];  // fragments of the first and the second words of each block
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    uint32_t (&words)[4] = wide[i / 4][i % 4 / 2];
                    widen<Fp16, B_FP8>(left[i / 4][i % 4], words[i % 2], words[i % 2 + 2]);
                }
                const char* const row = here + lane / 16 * A_BLOCK + lane / 8 % 2 * 128 + lane % 8 * 16;
#pragma unroll
                for (int s = 0; s < SLICES; ++s) {
                    const uint4 right = load_matrices<false>(shared_address(row + 256 * s));
#pragma unroll
                    for (int block = 0; block < 2; ++block) {
                        float d[4] = {};
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            uint32_t low, high;
                            widen<Fp16, A_FP8>(word(right, 2 * block + i), low, high);
                            mma<Fp16>(d, wide[block][i], low, high);
                        }
                        add(block, s, d);
                    }
                }
            }
        }
    };

    // Main loop, over chunks of a.
    for (int first = block_start; first < block_stop; first += K_CHUNK / UNIT) {
        const int count = min(K_CHUNK / UNIT, block_stop - first);
        if (first > block_start) __syncthreads();  // the chunk before was read
        Unit flight[UNROLL];
        const int start = first + count * warp_k / WARPS_K, stop = first + count * (warp_k + 1) / WARPS_K;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int64_t n = column(i / 2, i % 2);
            piece_at[i] = b + n * b_n + start * UNIT + quarter * DEPTH;
            scale_at[i] = b_scale + n * bs_n + int64_t(2 * start + quarter / 2) * bs_k;
        }
        // a, with zeros past K, in pieces of 16 bytes, row after row: `take` loads AHEAD of them, `put` stores them.
        const uint32_t all = rows * A_PIECES;
        uint4 taken[AHEAD];
        uint32_t taken_scale[AHEAD];
        auto take = [&](uint32_t i) {
#pragma unroll
            for (int p = 0; p < AHEAD; ++p, i += THREADS) {
                const int row = i < all ? source(i / A_PIECES) : -1, k = first * UNIT + i % A_PIECES * 16;
                const bool inside = row >= 0 && k < K;
                taken[p] = inside ? load_ahead(a + int64_t(row) * a_m + k) : make_uint4(0, 0, 0, 0);
                taken_scale[p] = inside ? load_byte_ahead(a_scale + int64_t(row) * as_m + int64_t(k / 32) * as_k) : 0;
                if constexpr (!EVEN_K) taken[p] = first_bytes(taken[p], K - k);
            }
        };
        auto put = [&](uint32_t i) {
#pragma unroll
            for (int p = 0; p < AHEAD; ++p, i += THREADS) {
                if (i >= all) break;
                const int row = i / A_PIECES, piece = i % A_PIECES, block = piece / 2;
                char* const to = memory + block * A_BLOCK + row / 8 * 256 + row % 8 * 16 + piece % 2 * 4;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    *reinterpret_cast<uint32_t*>(to + j % 2 * 128 + j / 2 * 8) = word(taken[p], j);
                const int scale = block / 2 * (ROWS * 2) + row / 2 * 4 + block % 2 * 2 + row % 2;
                if (piece % 2 == 0) reinterpret_cast<float*>(memory + A_SCALES)[scale] = scale_of(taken_scale[p]);
            }
        };
        // The loads of a are issued before those of b, behind which they would else queue. The last ones are stored
        // only after the first loads of b are issued.
        uint32_t piece = threadIdx.x;
        take(piece);
        for (uint32_t left = all; left > AHEAD * THREADS; left -= AHEAD * THREADS) {
            put(piece);
            take(piece += AHEAD * THREADS);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) load(flight[i], start + i, stop);
        put(piece);
        if constexpr (TOGETHER) fence_async();
        __syncthreads();
        for (int index = start; index < stop; index += UNROLL) {
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (index + i < stop) multiply(flight[i], index + i - first);
                load(flight[i], index + i + UNROLL, stop);
            }
        }
    }

    // Epilogue: put the warps' sums (WARPS_K, rows, PITCH) over a.
    __syncthreads();
    put_sums(reinterpret_cast<float*>(memory), acc, rows, warp_k, quarter, tile_n, column);
    __syncthreads();

    // Reduce over warps and the cluster; add the bias or apply the token's weight, and store a pair of columns at a
    // time. Pairs are counted along the rows of the tile.
    add_sums(memory, rows, received, rank, [&](int pair, float2 total) {
        const int row = pair / (BN / 2), n = tile_n + pair % (BN / 2) * 2;
        if (n >= N) return;
#if ROUTED
        if (ids[row] < 0) return;
        const int64_t to = ids[row];
        if (token_weights != nullptr) {
            const float weight = __ldg(token_weights + to);
            total.x *= weight;
            total.y *= weight;
        }
#else
        const int64_t to = int64_t(matrix) * M + first_m + row;
#endif
        if constexpr (HAS_BIAS) {
            total.x += float(bias[n]);
            if (n + 1 < N) total.y += float(bias[n + 1]);
        }
        store_pair(out + to * N + n, total.x, total.y, N - n);
    });
}

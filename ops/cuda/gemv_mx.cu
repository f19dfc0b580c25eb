// Few rows by an MX-FP8 weight: out (B, M, N) = a (B, M, K) · b (B, K, N) + bias, each with a scale for 32 along K.
//
// As `gemv_a16w8.cu` with K contiguous, which explains the division of the work; the operands become bfloat16 on the
// way. A value of FP8 times a power of two is exact there, but for parts below bfloat16's least, 2 ** -133: so nothing
// is left for the sums. Rows of a are widened and scaled while they are brought to shared memory, columns of b
// in registers, before the product.
//
// ROUTED, rows are those of tokens: `ids` of a tile of `block_m` that have one expert, a matrix of b. Row id / a_div of
// a becomes row id of out, times a weight. Tiles past the last, or without an expert, end at once.
//
// Each block has `prefetched` bytes of a column at most brought to the L2: all that are resident have room there.
//
// Macros: A_FP8 and B_FP8 of the enum Fp8, EVEN_K (K is a multiple of 16), ROUTED, ROWS (a multiple of 8, up to 32),
// TILES, WARPS_N, WARPS_K, UNROLL, AHEAD (pieces of a that a thread asks for at once), CLUSTER, CHUNK, RESIDENT,
// OUT (BF16, FP16, FP32), BIAS (0, BF16, FP16, FP32).
#include "narrow.cuh"

constexpr int UNIT = 64;  // of K: two blocks
constexpr int DEPTH = 16;  // of K, that a thread has of a unit: half a block
constexpr int PIECES = 2 * TILES;  // of 16 bytes, that a thread has of a unit
constexpr int A_PIECES = CHUNK / 16;  // of 16, that a row of a has in shared memory
// Rows of a lie apart so that eight threads, four of each of two rows, read 128 bytes of all banks.
constexpr int A_PITCH = CHUNK * 2 + 16;  // bytes

struct Unit {
    uint4 piece[PIECES];
    uint32_t scale[PIECES];  // as stored
};

// 2 ** (stored - 127) twice in bfloat16; NaN of 255.
INLINE uint32_t scale_pair(uint32_t stored) {
    const uint32_t bits = max((stored << 7) + (stored + 1 >> 8), 0x40u);
    return bits | bits << 16;
}

// Four values of FP8 times a scale as two pairs of bfloat16, the lowest byte first.
template <Fp8 TYPE>
INLINE void widen_scaled(uint32_t bytes, uint32_t scale, uint32_t& low, uint32_t& high) {
    widen<Bf16, TYPE>(bytes, low, high);
    low = multiply_pairs(low, scale);
    high = multiply_pairs(high, scale);
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, RESIDENT)
gemv_mx(const uint8_t* a, const uint8_t* a_scale, const uint8_t* b, const uint8_t* b_scale, const BiasType* bias,
        OutType* out, const int* sorted_token_ids, const int* expert_ids, const int* num_tokens_post_padded,
        const float* token_weights, int M, int N, int K, int received, int prefetched, int a_batch, int a_m,
        int as_batch, int as_m, int as_k, int b_batch, int b_n, int bs_batch, int bs_k, int bs_n, int experts,
        int block_m, int a_div) {
    let_next_begin();
    char* const memory = block_memory();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = lane / 4, quarter = lane % 4;  // the fragments' rows and columns
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int tile_n = blockIdx.x / CLUSTER * BN;
    const int first_n = tile_n + warp_n * COLUMNS;

#if ROUTED
    wait_for_launches();  // what the tile multiplies is not known before
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
    {
        const int k = block_start * UNIT, stop = min(min(block_stop * UNIT, K), k + prefetched), bytes = stop - k & ~15;
        const int along_k = bytes > 0 ? (stop - k + 31) / 32 : 0, columns = min(BN, N - tile_n);
        for (int n = threadIdx.x; n < columns && bytes > 0; n += THREADS)
            prefetch(b + int64_t(tile_n + n) * b_n + k, bytes);
        // Their scales lie in lines of columns or of blocks along K; elsewhere they are not asked for ahead.
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

    const uint8_t* const columns = b + int64_t(column(0, 0)) * b_n + quarter * DEPTH;
    const uint8_t* const scales = b_scale + int64_t(column(0, 0)) * bs_n + int64_t(quarter / 2) * bs_k;
    auto load = [&](Unit& unit, int index, int stop) {
        const int room = min(stop * UNIT, K) - index * UNIT - quarter * DEPTH;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const bool inside = column(i / 2, i % 2) < N && room > 0;
            unit.piece[i] = inside ? load_ahead(columns + int64_t(8 * i) * b_n + index * UNIT) : make_uint4(0, 0, 0, 0);
            unit.scale[i] = inside ? load_byte_ahead(scales + int64_t(8 * i) * bs_n + int64_t(2 * index) * bs_k) : 0;
            if constexpr (!EVEN_K) unit.piece[i] = first_bytes(unit.piece[i], room);
        }
    };

    float acc[TILES][SLICES][4] = {};

    // `at`: where the unit begins in the chunk of a.
    auto multiply = [&](const Unit& unit, int at) {
        uint32_t right[SLICES][DEPTH / 2];
        load_rows<DEPTH>(right, memory, A_PITCH, rows, group, (at + quarter * DEPTH) * 2);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint32_t upper = scale_pair(unit.scale[2 * tile]), lower = scale_pair(unit.scale[2 * tile + 1]);
#pragma unroll
            for (int j = 0; j < DEPTH / 4; j++) {
                uint32_t left[4];
                widen_scaled<B_FP8>(word(unit.piece[2 * tile], j), upper, left[0], left[2]);
                widen_scaled<B_FP8>(word(unit.piece[2 * tile + 1], j), lower, left[1], left[3]);
#pragma unroll
                for (int s = 0; s < SLICES; s++) mma<Bf16>(acc[tile][s], left, right[s][2 * j], right[s][2 * j + 1]);
            }
        }
    };

    for (int first = block_start; first < block_stop; first += CHUNK / UNIT) {
        const int count = min(CHUNK / UNIT, block_stop - first);
        if (first > block_start) __syncthreads();  // the chunk before was read
        Unit flight[UNROLL];
        const int start = first + count * warp_k / WARPS_K, stop = first + count * (warp_k + 1) / WARPS_K;
        // a, with zeros past K: pieces of 16, row after row.
        const uint32_t all = rows * A_PIECES;
        uint4 taken[AHEAD];
        uint32_t taken_scale[AHEAD];
        auto take = [&](uint32_t i) {
#pragma unroll
            for (int p = 0; p < AHEAD; p++, i += THREADS) {
                const int row = i < all ? source(i / A_PIECES) : -1, k = first * UNIT + i % A_PIECES * 16;
                const bool inside = row >= 0 && k < K;
                taken[p] = inside ? load_ahead(a + int64_t(row) * a_m + k) : make_uint4(0, 0, 0, 0);
                taken_scale[p] = inside ? load_byte_ahead(a_scale + int64_t(row) * as_m + int64_t(k / 32) * as_k) : 0;
                if constexpr (!EVEN_K) taken[p] = first_bytes(taken[p], K - k);
            }
        };
        auto put = [&](uint32_t i) {
#pragma unroll
            for (int p = 0; p < AHEAD; p++, i += THREADS) {
                if (i >= all) break;
                const uint32_t scale = scale_pair(taken_scale[p]);
                uint32_t pair[8];
#pragma unroll
                for (int j = 0; j < 4; j++) widen_scaled<A_FP8>(word(taken[p], j), scale, pair[2 * j], pair[2 * j + 1]);
                uint4* to = reinterpret_cast<uint4*>(memory + i / A_PIECES * A_PITCH + i % A_PIECES * 32);
                to[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
                to[1] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
            }
        };
        // Asked for first, or it would come after all of b; what is asked for last is put after b is asked for.
        uint32_t piece = threadIdx.x;
        take(piece);
        for (uint32_t left = all; left > AHEAD * THREADS; left -= AHEAD * THREADS) {
            put(piece);
            take(piece += AHEAD * THREADS);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) load(flight[i], start + i, stop);
        put(piece);
        __syncthreads();
        for (int index = start; index < stop; index += UNROLL) {
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                if (index + i < stop) multiply(flight[i], (index + i - first) * UNIT);
                load(flight[i], index + i + UNROLL, stop);
            }
        }
    }

    // Sums (WARPS_K, rows, PITCH) in the place of a.
    __syncthreads();
    put_sums(reinterpret_cast<float*>(memory), acc, rows, warp_k, quarter, tile_n, column);
    __syncthreads();

    // Stores the sums of a pair of columns; pairs are counted along the rows of the tile.
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
#if BIAS
        total.x += float(bias[n]);
        if (n + 1 < N) total.y += float(bias[n + 1]);
#endif
        store_pair(out + to * N + n, total.x, total.y, N - n);
    });
}

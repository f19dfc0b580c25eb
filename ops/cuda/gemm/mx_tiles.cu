// Few rows by an MX-FP8 weight, by TMA and wgmma: out (B, M, N) = a (B, M, K) · b (B, K, N) + bias, where each operand
// has an e8m0 scale for 32 elements along K.
//
// Decomposition. A block, or a cluster of CLUSTER blocks that share K, has BN columns of b and ROWS rows of a. Columns
// of b are the rows of wgmma's left operand, 64 for each warpgroup, and rows of a its columns, so that ROWS are no more
// than needed. WARPS_K 2 gives each of two warpgroups half of every K tile. Warps and blocks that share K are summed as
// in `gemv_mx.cu`.
//
// Pipeline. A producer warp keeps STAGES K tiles of 128 of both operands in flight by TMA: loads in flight take no
// registers, of which the sums of many rows leave few. A wgmma multiplies one block of 32, from zero; its result, times
// the scale of b and then the scale of a, is added in float32, as in `gemv_mx.cu`.
//
// Overlap: as in `decode_tiles.cuh`.
//
// Shared memory: b (STAGES, BN, BK), a (STAGES, ROWS, BK), sums of the cluster, the mbarriers, and the scales of the
// block's whole part of K: of a as float32, of b, of which a thread reads fewer, as the upper halves of float32.
//
// Macros: A_FP8 and B_FP8 of the enum Fp8 (also the types of the generated `wgmma`, which has ROWS columns), OUT and
// BIAS of the enum Element; ROWS (8, 16, 32, 64), TILES (1); A_SCALES_ALONG_K and B_SCALES_ALONG_K (whether the scales
// of a row or column are consecutive bytes; else the scales of a block of 32 are); WARPS_N (4 are a warpgroup) and
// WARPS_K (1, 2); STAGES, DEPTH (products in flight: 1, 2), CLUSTER, RESIDENT (blocks a multiprocessor), W_CONSTANT,
// LATE.
#define COPYING 1
#include "decode_tiles.cuh"

constexpr int BLOCKS = 4 / WARPS_K;  // blocks of 32 along K that a warpgroup multiplies in a K tile
static_assert(WARPS_K <= 2);

constexpr int A_BYTES = ROWS * BK, B_BYTES = BN * BK;  // of a stage
// The scales of a for one block of 32, as float32: four threads share the columns of b, and each has the scales of its
// own rows. The four quarters are padded so that the four threads read different banks.
constexpr int A_QUARTER = ROWS == 64 ? 20 : ROWS / 4;
constexpr int A_BLOCK = 4 * A_QUARTER;
constexpr int A_SCALES_PITCH = 4 * A_BLOCK + 4;  // padded, so that K tiles are written to different banks

constexpr int AT_A = STAGES * B_BYTES;
constexpr int AT_ARRIVED = AT_A + STAGES * A_BYTES;
constexpr int AT_FULL = AT_ARRIVED + (CLUSTER > 1 ? ROWS * BN * 4 + CLUSTER * 8 : 0);
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int AT_SENT = AT_EMPTY + STAGES * 8;
constexpr int AT_SCALES = (AT_SENT + 8 + 15) / 16 * 16;
static_assert(AT_ARRIVED >= WARPS_K * ROWS * PITCH * 4, "sums take the place of the stages");

// Calls `put(line, block of 32, value)` with each scale of the first `lines` of MOST rows of a or columns of b, for
// `steps` K tiles. A load has four scales, along K or of four lines, and AHEAD loads are in flight.
template <int MOST, bool ALONG_K, typename Put>
INLINE void read_scales(const uint8_t* from, int line_step, int block_step, int lines, int steps, Put put) {
    constexpr int AHEAD = 8, ACROSS = MOST / 4;
    const uint32_t words = ALONG_K ? lines * steps : ACROSS * steps * 4;
    for (uint32_t first = threadIdx.x; first < words; first += AHEAD * MULTIPLYING) {
        uint32_t taken[AHEAD];
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            const uint32_t i = first + p * MULTIPLYING;
            const int line = ALONG_K ? i / steps : i % ACROSS * 4, block = ALONG_K ? i % steps * 4 : i / ACROSS;
            taken[p] = 0;
            if (i < words && line < lines) {
                const uint8_t* at = from + int64_t(line) * line_step + int64_t(block) * block_step;
                taken[p] = load_constant(reinterpret_cast<const uint32_t*>(at));
            }
        }
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            const uint32_t i = first + p * MULTIPLYING;
            const int line = ALONG_K ? i / steps : i % ACROSS * 4, block = ALONG_K ? i % steps * 4 : i / ACROSS;
            if (i >= words) break;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                put(ALONG_K ? line : line + j, ALONG_K ? block + j : block, scale_of(taken[p] >> 8 * j & 255));
        }
    }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, RESIDENT)
    mx_tiles(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const uint8_t* a_scale,
             const uint8_t* b_scale, const BiasType* bias, OutType* out, int M, int N, int K, int prefetched,
             int a_batched, int b_batched, int as_batch, int as_m, int as_k, int bs_batch, int bs_n, int bs_k) {
    if constexpr (!LATE) let_next_begin();
    char* const stages = swizzled_memory();
    const uint32_t base = shared_address(stages);
    auto full = [&](int stage) { return base + AT_FULL + stage * 8; };
    auto empty = [&](int stage) { return base + AT_EMPTY + stage * 8; };
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so that the compiler knows that a warp branches as one
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int tile_n = blockIdx.x / CLUSTER * BN, first_m = blockIdx.y * ROWS, matrix = blockIdx.z;
    const int rows = min(M - first_m, ROWS);
    const uint32_t steps = K / BK;
    const int start = steps * rank / CLUSTER, count = steps * (rank + 1) / CLUSTER - start;
    float* const a_scales = reinterpret_cast<float*>(stages + AT_SCALES);
    // (count, BN), each the four scales of a K tile, of 16 bits.
    uint2* const b_scales = reinterpret_cast<uint2*>(a_scales + count * A_SCALES_PITCH);

    // Prologue: initialize the mbarriers.
    if (threadIdx.x == INITIALIZING) init_barriers(base + AT_FULL, STAGES, bytes_of_share(rows, rank));
    if constexpr (CLUSTER > 1) cluster_arrive();
    __syncthreads();

    float acc[1][SLICES][4] = {};
    if (warp == WARPS) {
        if (elect()) {
            auto load_b = [&](int stage, int step) {
                barrier_expect(full(stage), A_BYTES + B_BYTES);
                tma_load(base + stage * B_BYTES, b, full(stage), (start + step) * BK, tile_n, matrix * b_batched);
            };
            auto load_a = [&](int stage, int step) {
                tma_load(base + AT_A + stage * A_BYTES, a, full(stage), (start + step) * BK, first_m,
                         matrix * a_batched);
            };
            auto prefetch = [&](int step) { tma_prefetch(b, (start + step) * BK, tile_n, matrix * b_batched); };
            produce<true>(count, prefetched, empty, load_b, load_a, prefetch);
        }
        __syncwarp();
    } else {
        // Consumers: bring the scales to shared memory, those of a constant weight before the wait.
        b_scale += int64_t(matrix) * bs_batch + int64_t(tile_n) * bs_n + int64_t(start * 4) * bs_k;
        a_scale += int64_t(matrix) * as_batch + int64_t(first_m) * as_m + int64_t(start * 4) * as_k;
        const int columns = min(BN, N - tile_n);
        auto put_scale_of_a = [&](int row, int block, float scale) {
            a_scales[block / 4 * A_SCALES_PITCH + block % 4 * A_BLOCK + row % 8 / 2 * A_QUARTER + row / 8 * 2 +
                     row % 2] = scale;
        };
        auto put_scale_of_b = [&](int column, int block, float scale) {
            reinterpret_cast<uint16_t*>(b_scales)[(block / 4 * BN + column) * 4 + block % 4] =
                __float_as_uint(scale) >> 16;
        };
        if constexpr (W_CONSTANT) {
            read_scales<BN, B_SCALES_ALONG_K>(b_scale, bs_n, bs_k, columns, count, put_scale_of_b);
        } else {
            const int lines = B_SCALES_ALONG_K ? columns : count * 4, along = B_SCALES_ALONG_K ? count * 4 : columns;
            for (int line = threadIdx.x; line < lines; line += MULTIPLYING)
#pragma unroll 1
                for (int i = 0; i < along; i += 32)
                    prefetch_line(b_scale + int64_t(line) * (B_SCALES_ALONG_K ? bs_n : bs_k) + i);
        }
        wait_for_launches();
        if constexpr (LATE) let_next_begin();
        if constexpr (!W_CONSTANT)
            read_scales<BN, B_SCALES_ALONG_K>(b_scale, bs_n, bs_k, columns, count, put_scale_of_b);
        read_scales<ROWS, A_SCALES_ALONG_K>(a_scale, as_m, as_k, rows, count, put_scale_of_a);
        sync_first<MULTIPLYING>();

        const int first_block = warp_k * BLOCKS, column = warp_n * 16 + group;
        const uint32_t from_b = base + warp_n / 4 * 64 * BK, from_a = base + AT_A;
        // Starts the product of one block of 32 as a wgmma group.
        auto multiply = [&](float (&d)[ROWS / 2], int stage, int block) {
            fence_registers(d);
            wgmma_fence();
            wgmma(d, matrix_descriptor(from_b + stage * B_BYTES) + 2 * block,
                  matrix_descriptor(from_a + stage * A_BYTES) + 2 * block, 0);
            wgmma_commit();
            fence_registers(d);
        };
        // Promote: acc += d * scale of b * scale of a. `left` and `right` are the scales of the thread's two columns.
        auto add = [&](float (&d)[ROWS / 2], int step, int i, uint2 left, uint2 right) {
            fence_registers(d);
            const int block = first_block + i;
            auto unpacked = [&](uint2 halves) {
                const uint32_t pair = block < 2 ? halves.x : halves.y;
                return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            };
            const float scale[2] = {unpacked(left), unpacked(right)};
            const float* const of_rows = a_scales + step * A_SCALES_PITCH + block * A_BLOCK + quarter * A_QUARTER;
#pragma unroll
            for (int s = 0; s < SLICES; s += 2) {
                float4 rows_scales;
                if constexpr (SLICES == 1) {
                    const float2 pair = *reinterpret_cast<const float2*>(of_rows);
                    rows_scales = make_float4(pair.x, pair.y, 0, 0);
                } else {
                    rows_scales = *reinterpret_cast<const float4*>(of_rows + 2 * s);
                }
#pragma unroll
                for (int i = s; i < min(s + 2, SLICES); ++i) {
                    const float even = i == s ? rows_scales.x : rows_scales.z,
                                odd = i == s ? rows_scales.y : rows_scales.w;
                    float (&sum)[4] = acc[0][i];
                    sum[0] += d[4 * i] * scale[0] * even;
                    sum[1] += d[4 * i + 1] * scale[0] * odd;
                    sum[2] += d[4 * i + 2] * scale[1] * even;
                    sum[3] += d[4 * i + 3] * scale[1] * odd;
                }
            }
        };
        auto release = [&](int stage) {
            if (lane == 0) barrier_arrive(empty(stage));
        };

        // Main loop: DEPTH products in flight.
        Ring ring;
        float d[DEPTH][ROWS / 2];
#pragma unroll 1
        for (int step = 0; step < count; ++step, ring.advance()) {
            const int stage = ring.stage;
            const uint2* const of_columns = b_scales + step * BN + column;
            const uint2 left = of_columns[0], right = of_columns[8];
            barrier_wait(full(stage), ring.parity);
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                float (&mine)[ROWS / 2] = d[i % DEPTH];
                if constexpr (DEPTH == 1) {
                    multiply(mine, stage, first_block + i);
                    wgmma_wait<0>();
                } else {
                    if (i == 0) multiply(mine, stage, first_block);
                    if (i + 1 < BLOCKS) {
                        multiply(d[(i + 1) % DEPTH], stage, first_block + i + 1);
                        wgmma_wait<1>();
                    } else {
                        wgmma_wait<0>();
                    }
                }
                if (i + 1 == BLOCKS) release(stage);
                add(mine, step, i, left, right);
            }
        }
    }

    // Epilogue: reduce over warps and the cluster, from sums (WARPS_K, rows, PITCH) that overwrite the stages; store.
    __syncthreads();
    auto column_of = [&](int, int half) { return warp_n * 16 + 8 * half + group; };
    if (warp < WARPS) put_sums(reinterpret_cast<float*>(stages), acc, rows, warp_k, quarter, 0, column_of);
    __syncthreads();
    if (threadIdx.x >= ADDING) return;
    auto finish = [&](int pair, float2 total) {
        const int row = pair / (BN / 2), n = tile_n + pair % (BN / 2) * 2;
        if (n >= N) return;
        if constexpr (HAS_BIAS) {
            total.x += float(bias[n]);
            if (n + 1 < N) total.y += float(bias[n + 1]);
        }
        store_pair(out + (int64_t(matrix) * M + first_m + row) * N + n, total.x, total.y, N - n);
    };
    auto send = [&](float2* to, uint32_t block, float2 sums) {
        send_to_block(shared_address(to), base + AT_SENT, block, sums);
    };
    add_sums(stages, rows, AT_ARRIVED, rank, finish, send, [&] { barrier_wait(base + AT_SENT, 0); });
}

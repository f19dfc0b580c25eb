// Few rows by an FP8 weight, by TMA and FP8 wgmma: out (M, N) = x (M, K) · (w (K, N) * w_scale) + bias, x of 16 bits.
//
// The weight stays FP8 from memory to the tensor core. Instead x, which is small, is split into FP8: the 8 significant
// bits of a bfloat16 are those of two e4m3 values, the 11 of a float16 those of three: x = scale * (p0 + p1 / 32 + p2 /
// 1024), with a power of two for each row and 128 of K (`split.cuh`). The split is exact except for elements 2 ** 14
// times smaller than the largest of their 128, which are rounded to 2 ** -22 of it. The products of the parts are
// columns of one wgmma, whose accumulators, of about 14 bits, hold one K tile; they are scaled and added in float32. An
// infinite x makes its scale infinite: of several in one row and K tile, the sum of their products decides.
//
// Decomposition. A block, or a cluster of CLUSTER blocks that share K, has BN columns of w and ROWS rows of x. The
// columns of w are the rows of wgmma's left operand, 64 for each warpgroup. The blocks of a cluster exchange their sums
// by `exchange.cuh`.
//
// Pipeline. A producer warp keeps STAGES K tiles of w in flight by TMA; x lies in shared memory for all of the block's
// part of K. Where the stages hold the block's whole part of w there is no producer warp, and the consumers load HELD
// of the stages into registers while x is still on its way: with as few columns as x has, a wgmma waits for its left
// operand longer than it multiplies.
//
// Overlap: as in `decode_tiles.cuh`.
//
// GATED: the rows are silu(x) * up, computed in float32 and rounded to the type of x when they are split. Each block
// computes those of its part of K.
//
// BESIDE: further blocks multiply the same x by further weights, each with its bias, into its own output.
//
// Shared memory: w (STAGES, BN, BK), the cluster's sums, the mbarriers, x (count, PARTS * ROWS, BK), scales of x and of
// w.
//
// Macros: INPUT (BF16, FP16), OUT and BIAS of the enum Element; B_FP8 of the enum Fp8, the type of w (A_FP8, that of
// the parts of x, is E4M3; the generated `wgmma` has ROWS columns for each part); TAIL, whether K is a multiple of 8
// and not of 128, so that zeros follow it; GATED (0, 1); BESIDE (0, 1, 2), weights after the first; SCALE (LINE, VECTOR,
// BLOCK: see scale_kinds.cuh); ROWS (8, 16); TILES (1); WARPS_N (4 are a warpgroup); WARPS_K (1); X_ROWS (the next power
// of two to M, up to ROWS); LANES (8 or 16, which share a row of a K tile), AHEAD (such parts of x that a thread loads
// at once); STAGES, CLUSTER, RESIDENT (blocks a multiprocessor), W_CONSTANT, LATE; HELD, stages of w that are held in
// registers, or 0, of which READY are loaded before the wait; X_OVER, whether x overwrites the stages that are held.
#include "decode_tiles.cuh"
#include "exchange.cuh"
#include "gated_pairs.cuh"
#include "split.cuh"

constexpr int W_BYTES = BN * BK;  // of a stage
constexpr int PARTS = INPUT == Element::BF16 ? 2 : 3;  // FP8 values that make an element of x
constexpr int SUMS = PARTS * ROWS / 2;  // accumulators of a thread
constexpr int X_BYTES = PARTS * ROWS * BK;  // of a stage: the first parts of the rows, then the second ones
constexpr int AT_ARRIVED = STAGES * W_BYTES;
constexpr int AT_FULL = AT_ARRIVED + SUMS_BYTES;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int AT_SENT = AT_EMPTY + STAGES * 8;
constexpr int AT_REST = (AT_SENT + 8 + 1023) / 1024 * 1024;
constexpr int AT_X = X_OVER ? 0 : AT_REST;
static_assert(!X_OVER || STAGES * X_BYTES <= HELD * W_BYTES);

constexpr int PIECES = BK / (8 * LANES);  // 16-byte pieces of x that a thread has of an item
constexpr int ITEMS = THREADS / LANES;  // items, rows of a K tile, that a block splits at a time
constexpr int COPIES = HELD > 0 ? 0 : 32;  // threads of the producer warp; stages that are filled once need none
constexpr int STAGES_ON = ITEMS / X_ROWS;  // K tiles from an item of a thread to its next
static_assert(ITEMS % X_ROWS == 0);
static_assert(READY <= HELD && (READY == 0 || W_CONSTANT));
static_assert(HELD == 0 || (HELD <= STAGES && STAGES <= AHEAD * STAGES_ON), "all of x is loaded at once");

#define MAP const __grid_constant__ TensorMap
using Scales = const float*;
using Bias = const BiasType*;
using Out = OutType*;
#if BESIDE > 0
#define SECOND_WEIGHT , MAP w_second, Scales w_second_scale, Bias bias_second, Out out_second, int n_second
#else
#define SECOND_WEIGHT
#endif
#if BESIDE > 1
#define THIRD_WEIGHT , MAP w_third, Scales w_third_scale, Bias bias_third, Out out_third, int n_third
#else
#define THIRD_WEIGHT
#endif

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS + COPIES, RESIDENT)
    a16w8_tiles(const uint16_t* x, const __grid_constant__ TensorMap w, const float* w_scale, const BiasType* bias,
                OutType* out, int M, int n, int K, int prefetched, int x_m, int s_k, int s_n, int bias_n,
                const uint16_t* up, int up_m SECOND_WEIGHT THIRD_WEIGHT) {
    if constexpr (!LATE) let_next_begin();
    char* const stages = swizzled_memory();
    const uint32_t base = shared_address(stages);
    auto full = [&](int stage) { return base + AT_FULL + stage * 8; };
    auto empty = [&](int stage) { return base + AT_EMPTY + stage * 8; };
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so that the compiler knows that a warp branches as one
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    // The weight of this block with its scales, bias, output and columns, and the tile among its columns.
    const TensorMap* own_w = &w;
    Scales own_scale = w_scale;
    [[maybe_unused]] Bias own_bias = bias;
    Out own_out = out;
    int N = n, tile = blockIdx.x / CLUSTER;
#if BESIDE > 0
    if (const int before = (N + BN - 1) / BN; tile >= before)
        own_w = &w_second, own_scale = w_second_scale, own_bias = bias_second, own_out = out_second, N = n_second,
        tile -= before;
#endif
#if BESIDE > 1
    if (const int before = (N + BN - 1) / BN; own_w == &w_second && tile >= before)
        own_w = &w_third, own_scale = w_third_scale, own_bias = bias_third, own_out = out_third, N = n_third,
        tile -= before;
#endif
    const int tile_n = tile * BN, first_m = blockIdx.y * ROWS;
    const int rows = min(M - first_m, ROWS);
    const uint32_t steps = TAIL ? (K + BK - 1) / BK : K / BK;
    const int start = steps * rank / CLUSTER, count = HELD > 0 ? STAGES : steps * (rank + 1) / CLUSTER - start;
    const uint32_t after_x = AT_REST + (X_OVER ? 0 : count * X_BYTES), x_scales_at = base + after_x;
    float* const x_scales = reinterpret_cast<float*>(stages + after_x);  // (count, ROWS)
    float* const w_scales = x_scales + count * ROWS;  // VECTOR: (count, BN); BLOCK: (count, BN / 64); LINE: (BN)

    auto load = [&](int stage, int step) {
        barrier_expect(full(stage), W_BYTES);
        tma_load(base + stage * W_BYTES, *own_w, full(stage), (start + step) * BK, tile_n, 0);
    };
    auto prefetch = [&](int step) { tma_prefetch(*own_w, (start + step) * BK, tile_n, 0); };
    if (threadIdx.x == INITIALIZING) init_barriers(base + AT_FULL, STAGES, bytes_of_sums(rows, rank));
    begin_loads(warp, load, prefetch);
    if (HELD == 0 && warp == WARPS) {
        if (elect()) produce<false>(count, prefetched, empty, load, [](int, int) {}, prefetch);
        return;
    }

    // Consumers.
    float acc[SLICES][4] = {};
    auto read = [&] { read_scales<BN, THREADS>(w_scales, own_scale, start, count, tile_n, N, s_k, s_n); };
    if constexpr (W_CONSTANT) read();

    // LANES lanes share an item, one row of a K tile; X_ROWS consecutive items are the rows of a K tile. The addresses
    // of the first item are computed before the wait.
    const int item = threadIdx.x / LANES, along = threadIdx.x % LANES;
    const uint16_t* x_from =
        settled(x + int64_t(first_m + item % X_ROWS) * x_m + (start + item / X_ROWS) * BK + 8 * along);
    [[maybe_unused]] const uint16_t* up_from = nullptr;
    if constexpr (GATED)
        up_from = settled(up + int64_t(first_m + item % X_ROWS) * up_m + (start + item / X_ROWS) * BK + 8 * along);
    uint32_t to = settled(base + AT_X + item / X_ROWS * X_BYTES + item % X_ROWS * BK);
    auto piece = [&](int i) { return ((i ^ (item % X_ROWS % 8)) * 16); };
    uint32_t scale_to = settled(x_scales_at + (item / X_ROWS * ROWS + item % X_ROWS) * 4);
    // So are the addresses of the pairs of sums that this thread stores.
    const int pair = first_pair(rank, warp), pair_n = tile_n + pair, row = first_row();
    OutType* const pairs = settled(own_out + (int64_t(first_m) + row) * N + pair_n);
    const int room = settled(N - pair_n);
    const int64_t next_slice = SLICES > 1 ? settled(int64_t(8) * N) : 0;
    const uint32_t from_w = base + warp / 4 * 64 * BK, from_x = base + AT_X;
    [[maybe_unused]] uint32_t held[HELD + 1][BK / 32][4];
    auto hold = [&](int from, int stop) {
        const int row = warp % 4 * 16 + lane % 16;
#pragma unroll
        for (int step = from; step < stop; ++step) {
            barrier_wait(full(step), 0);
#pragma unroll
            for (int i = 0; i < BK / 32; ++i) {
                const uint4 m =
                    load_matrices<false>(from_w + step * W_BYTES + row * BK + ((2 * i + lane / 16) ^ row % 8) * 16);
#pragma unroll
                for (int j = 0; j < 4; ++j) held[step][i][j] = word(m, j);
            }
        }
    };
    // Wait for the launches before this one; hold what of the weight does not depend on them.
    hold(0, READY);
    wait_for_launches();
    if constexpr (LATE) let_next_begin();
    if constexpr (!W_CONSTANT) {
        if (HELD > 0 && warp == 0) {
            if (elect())
                for (int step = 0; step < STAGES; ++step) load(step, step);
            __syncwarp();
        }
        read();
    }
    [[maybe_unused]] float2 biases[PAIRS];
    if constexpr (HAS_BIAS) read_biases(biases, own_bias, 0, pair_n, room, bias_n);
    // Split x into FP8 parts, in shared memory, with a scale for each row and K tile.
    for (int first = 0; first < (HELD > 0 ? 1 : count); first += AHEAD * STAGES_ON) {
        auto place = [&](int p) { return to + p * STAGES_ON * X_BYTES; };
        bool inside[AHEAD];
        uint4 taken[AHEAD][PIECES];
        [[maybe_unused]] uint4 factors[AHEAD][PIECES];
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            inside[p] = first + item / X_ROWS + p * STAGES_ON < count && item % X_ROWS < rows;
            const uint16_t* const from = x_from + p * STAGES_ON * BK;
            const int left = TAIL ? K - (start + first + item / X_ROWS + p * STAGES_ON) * BK - 8 * along : BK;
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                taken[p][i] = load_written(from + i * 8 * LANES, inside[p] && left > i * 8 * LANES);
            if constexpr (GATED) {
                const uint16_t* const from_up = up_from + p * STAGES_ON * BK;
#pragma unroll
                for (int i = 0; i < PIECES; ++i)
                    factors[p][i] = load_written(from_up + i * 8 * LANES, inside[p] && left > i * 8 * LANES);
            }
        }
        hold(READY, HELD);
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            if constexpr (GATED) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) taken[p][i] = gated<XType>(taken[p][i], factors[p][i]);
            }
            uint32_t most = 0;
#pragma unroll
            for (int i = 0; i < 4 * PIECES; ++i) most = __vmaxu2(most, word(taken[p][i / 4], i % 4) & 0x7fff7fff);
#pragma unroll
            for (int mask = LANES / 2; mask > 0; mask /= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, mask));
            const int largest = max(most & 0xffff, most >> 16);
            const PartsScale scale = scale_of_parts<XType>(largest);
            uint32_t parts[PARTS][2 * PIECES];
#pragma unroll
            for (int i = 0; i < 2 * PIECES; ++i) {
                const uint4& eight = taken[p][i / 2];
                uint32_t of_four[PARTS];
                split<XType, PARTS>(word(eight, i % 2 * 2), word(eight, i % 2 * 2 + 1), scale, of_four);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) parts[part][i] = of_four[part];
            }
            if (X_OVER && p == 0) sync_first<THREADS>();  // all warps hold in registers what x overwrites
            if (inside[p]) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    const uint32_t at = place(p) + piece(LANES / 2 * i + along / 2) + along % 2 * 8;
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        store_shared(at + part * ROWS * BK, make_uint2(parts[part][2 * i], parts[part][2 * i + 1]));
                }
            }
            if (inside[p] && along == 0) store_shared(scale_to + p * STAGES_ON * ROWS * 4, scale.bits);
        }
        if constexpr (GATED) up_from += AHEAD * STAGES_ON * BK;
        x_from += AHEAD * STAGES_ON * BK, to += AHEAD * STAGES_ON * X_BYTES, scale_to += AHEAD * STAGES_ON * ROWS * 4;
    }
    fence_async();
    sync_first<THREADS>();

    const int column = warp * 16 + group;
    // Starts one wgmma group; `left(i)` is the i-th 32 of K of the weight, in registers or as a descriptor.
    auto multiply = [&](float (&d)[SUMS], int step, auto&& left) {
        const uint64_t right = matrix_descriptor(from_x + step * X_BYTES);
        fence_registers(d);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 32; ++i) wgmma(d, left(i), right + 2 * i, i > 0);
        wgmma_commit();
        fence_registers(d);
    };
    // Promote: combine the parts of x, scale and add.
    auto add = [&](float (&d)[SUMS], int step) {
        fence_registers(d);
        const float2 of_w = scales_of_columns(w_scales, step, warp, column);
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            const float2 scales = *reinterpret_cast<const float2*>(x_scales + step * ROWS + 8 * s + 2 * quarter);
            float (&sum)[4] = acc[s];
            auto all = [&](int i) {
                float total = d[4 * (s + (PARTS - 1) * SLICES) + i];
#pragma unroll
                for (int part = PARTS - 2; part >= 0; --part)
                    total = __fmaf_rn(total, 1.0f / 32, d[4 * (s + part * SLICES) + i]);
                return total;
            };
            sum[0] = __fmaf_rn(all(0), scales.x * of_w.x, sum[0]);
            sum[1] = __fmaf_rn(all(1), scales.y * of_w.x, sum[1]);
            sum[2] = __fmaf_rn(all(2), scales.x * of_w.y, sum[2]);
            sum[3] = __fmaf_rn(all(3), scales.y * of_w.y, sum[3]);
        }
    };
#if HELD
    auto start_product = [&](float (&d)[SUMS], int step) {
        if (step < HELD) {
            multiply(d, step, [&](int i) -> auto& { return held[step][i]; });
        } else {
            barrier_wait(full(step), 0);
            const uint64_t from = matrix_descriptor(from_w + step * W_BYTES);
            multiply(d, step, [&](int i) { return from + 2 * i; });
        }
    };
    multiply_stages<SUMS>(start_product, add);
#else
    // Main loop: two products in flight.
    float d[2][SUMS];
    Ring ring;
    auto next = [&](float (&d)[SUMS], int step) {
        const int stage = ring.stage;
        barrier_wait(full(stage), ring.parity);
        const uint64_t from = matrix_descriptor(from_w + stage * W_BYTES);
        multiply(d, step, [&](int i) { return from + 2 * i; });
        ring.advance();
        return stage;
    };
    // The stage is released only after the promotion: released earlier, ptxas makes each product wait for the one
    // before.
    auto finish = [&](float (&d)[SUMS], int stage, int step) {
        add(d, step);
        if (lane == 0) barrier_arrive(empty(stage));
    };
    int step = 0, stage0 = next(d[0], 0), stage1;
    for (; step + 2 < count; step += 2) {
        stage1 = next(d[1], step + 1);
        wgmma_wait<1>();
        finish(d[0], stage0, step);
        stage0 = next(d[0], step + 2);
        wgmma_wait<1>();
        finish(d[1], stage1, step + 1);
    }
    if (step + 1 < count) {
        stage1 = next(d[1], step + 1);
        wgmma_wait<1>();
        finish(d[0], stage0, step);
        wgmma_wait<0>();
        finish(d[1], stage1, step + 1);
    } else {
        wgmma_wait<0>();
        finish(d[0], stage0, step);
    }
#endif

    // Epilogue: reduce over the cluster, scale, add the bias, store pairs of columns.
    auto store = [&](int slice, int i, float2 sums) {
        if (8 * slice + row >= rows) return;
        if constexpr (SCALE == LINE) {
            const float2 scales = *reinterpret_cast<const float2*>(w_scales + pair + 8 * i);
            sums.x *= scales.x, sums.y *= scales.y;
        }
        if constexpr (HAS_BIAS) sums.x += biases[i].x, sums.y += biases[i].y;
        store_pair(pairs + slice * next_slice + 8 * i, sums.x, sums.y, room - 8 * i);
    };
    finish_sums(acc, stages, AT_ARRIVED, base + AT_SENT, rows, rank, warp, store);
}

// Many rows by an FP8 weight on Hopper: out (B, M, N) = x (B, M, K) · (w (B, K, N) * w_scale) + bias, x of 16 bits.
//
// The product is computed transposed, outᵀ = wᵀ xᵀ, because wgmma takes its left operand from registers: that is where
// wᵀ is widened from FP8 to the type of x.
//
// Decomposition. An output tile has BM = WIDTH * SLICES rows of x and BN = 64 * MATH / K_PARTS columns of w. MATH
// consumer warpgroups multiply, each 64 columns of w; with K_PARTS 2 both have the same columns, and every other K tile
// of 128. For each K tile a warpgroup widens its columns into 32 registers a thread, and multiplies them by SLICES
// parts of WIDTH rows of x. With TURNS two warpgroups alternate: one widens while the other multiplies. ONCE means that
// K is at most 128 and has one scale.
//
// Pipeline. TMA loads w into a ring of W_STAGES and slices of x into a ring of X_STAGES: a stage of w is released as
// soon as it is widened. Large tiles are PERSISTENT: a producer warpgroup issues the loads and gives its registers to
// the consumers. For small tiles every block has one tile, a consumer thread issues the loads, and RESIDENT blocks of a
// multiprocessor hide each other's latency; with IN_FLIGHT the rings hold all of K.
//
// Scales. Where the scale changes along K, each product goes into a temporary that is scaled and added to the
// accumulators. With more than 128 rows the temporary would not fit into registers. There the widened weight is
// multiplied by the power of two in its scale, which is exact, and the accumulators are kept in units of the rest of
// the scale, from 1 to 2: before each K tile they are multiplied by the change of that unit. From 256 rows on that takes
// 6 to 9 % of the time where all of a warpgroup's columns have one scale. There a weight for bfloat16, which has the
// range of the scales, is multiplied by its scale when it is widened, and rounded once.
//
// Gated. With PAIRS the launch computes silu(x · w) * (x · w_up), of persistent tiles of BN = 64 columns: warpgroup 0
// multiplies the columns of the gate, and warpgroup 1 the same columns of up. Both round their products to the type of
// out, put OUT_ROWS rows at a time into one of PAIRS pairs of buffers, and go on to the next tile. The producer
// warpgroup's other warps multiply silu(gate) by up, while the tensor cores compute that tile: the SiLU takes two
// instructions of the special function unit a value, 2048 cycles for 256 rows.
//
// Overlap. The kernel uses programmatic dependent launch. Before it waits for the launches before it, it prefetches the
// weight to the L2. Of a constant weight (W_CONSTANT: no launch that may still run writes the weight or its scales) a
// block that is not persistent fills its stages and widens the first K tile before it waits.
//
// Shared memory: w (W_STAGES, W_LINES, BK), x (X_STAGES, 2, WIDTH, 64), two output buffers a warpgroup or, with
// PAIRS, as many pairs of buffers of gate and up, the mbarriers.
//
// Macros: INPUT (BF16 or FP16, also the type of the generated `wgmma`), OUT (BF16, FP16) and BIAS of the enum Element;
// FP8 of the enum Fp8; SCALE (LINE, VECTOR, BLOCK: see scale_kinds.cuh); MATH (1, 2), K_PARTS (1, 2), WIDTH, SLICES,
// W_STAGES, X_STAGES, TURNS, ONCE, PERSISTENT, IN_FLIGHT, RESIDENT (blocks a multiprocessor), GROUP (as in
// scaled_mm.cu), W_CONSTANT, PAIRS (0 to BM / OUT_ROWS).
#include "a16w8.cuh"
#include "gated_pairs.cuh"
#include "groups.cuh"

#define GROUPED DENSE
#define CLUSTER 1
#define SPLIT 1
#define SHARE_B 1
#define B_ONCE 0
#if PAIRS
using Scales = const float*;
#define UP_PARAMETERS , const __grid_constant__ TensorMap w_up, Scales w_up_scale
#else
#define UP_PARAMETERS
#endif

constexpr int WARPGROUP = 128;
constexpr int THREADS = (MATH + PERSISTENT) * WARPGROUP;
constexpr int BK = 128;
constexpr int BM = WIDTH * SLICES;  // rows of x
constexpr bool GATED = PAIRS > 0;
constexpr int W_LINES = 64 * MATH / K_PARTS;  // columns of w in a stage, of both weights where GATED
constexpr int BN = GATED ? 64 : W_LINES;  // columns of out
constexpr int W_BYTES = W_LINES * BK;
constexpr int X_HALF = WIDTH * 64 * 2;  // half a K tile of a slice, in rows of 128 bytes
constexpr int X_BYTES = 2 * X_HALF;  // of a stage
constexpr int OUT_ROWS = 32;
constexpr int SILU_WARPS = 3;  // of the producer warpgroup
constexpr int OUT_BYTES = OUT_ROWS * 128;  // of an output buffer, 64 columns
constexpr bool HOLDS = SCALE == LINE || ONCE;  // one scale holds for all of K
constexpr bool ROUNDED = SCALE == BLOCK && !HOLDS && BM >= 256 && IS_BF16<XType>;  // the scaled weight is
// Accumulators are in units of the scale without its power of two.
constexpr bool IN_UNITS = !HOLDS && BM > 128 && !ROUNDED;
constexpr bool IN_RUNS = SCALE == BLOCK && PERSISTENT && !HOLDS;  // scales of RUN K tiles are loaded at a time
constexpr int RUN = 32;  // as many as a warp has lanes
constexpr int PREFETCHED = 8;  // K tiles of w, to the L2
static_assert(WIDTH % OUT_ROWS == 0, "the accumulators of a slice leave as whole parts");
static_assert(PERSISTENT || X_STAGES == W_STAGES * SLICES, "a K tile replaces a K tile");
static_assert(K_PARTS == 1 || (K_PARTS == 2 && MATH == 2 && !PERSISTENT), "sums of two warpgroups");
static_assert(K_PARTS == 1 || BM <= 128, "two parts of K would have units of their own");
static_assert(IN_FLIGHT || W_STAGES % K_PARTS == 0, "two parts of K would meet in a stage");
static_assert(!W_CONSTANT || !PERSISTENT, "of a later tile the weight is read after the wait in any case");
static_assert(!TURNS || (PERSISTENT && MATH == 2), "one of two warpgroups");
static_assert(!GATED || (PERSISTENT && MATH == 2 && !HAS_BIAS), "a warpgroup each for gate and up");

constexpr int AT_X = W_STAGES * W_BYTES;
constexpr int AT_OUT = AT_X + X_STAGES * X_BYTES;
constexpr int AT_BARRIERS = AT_OUT + 2 * (GATED ? PAIRS : BN / 64) * OUT_BYTES;
static_assert(K_PARTS == 1 || AT_OUT >= BM * 64 * 4, "sums take the place of the stages");

#include "ring.cuh"
#include "tiles.cuh"

// Two warpgroups alternate: each one waits at its own named barrier until the other one arrives there.
INLINE void take_turn(int warpgroup) { named_sync<256>(3 + warpgroup); }
INLINE void pass_turn(int warpgroup) { named_arrive<256>(4 - warpgroup); }

// Splits a scale into a power of two, returned as a pair of XType, and the rest. Every FP8 value times the power is
// exact in XType, and the rest is from 1 to 2 except for scales beyond these powers. A scale of 0 is 0 times 1: the
// change of unit divides by the rest. Sums in the unit of a very small scale could pass float32. For float16 a scale
// below 2^-100 counts as 0, whose products are too small for an output of float16. For bfloat16 a scale below the powers
// is rounded: the weight is multiplied by 16 times the scale, and the rest is 1/16. Without the 16 the largest subnormal
// scales would lose bits; with more, large sums would not fit.
INLINE uint32_t split_scale(float scale, float& rest) {
    constexpr bool WIDE = IS_BF16<XType>;
    constexpr int LEAST = (WIDE ? -102 : 0) + (FP8 == Fp8::E4M3 ? -15 : -8);  // the least FP8 values: 2^-9, 2^-16
    constexpr int MOST = (WIDE ? 112 : 0) + (FP8 == Fp8::E4M3 ? 7 : 0);
    const uint32_t exponent = __float_as_uint(scale) >> 23 & 0xff;
    const uint32_t power = min(max(exponent, 127u + LEAST), 127u + MOST);
    float factor = __uint_as_float(power << 23);
    rest = scale * __uint_as_float((254 - power) << 23);
    if (exponent < 127 + (WIDE ? LEAST : -100)) {
        factor = WIDE ? scale * 16.0f : 0.0f;
        rest = WIDE && scale != 0.0f ? 1 / 16.0f : 1.0f;
    }
    return pack<XType>(factor, factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mm_a16w8(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* w_scale,
             const BiasType* bias, const __grid_constant__ TensorMap out, const Problem problem, int x_batched,
             int w_batched, int s_batch, int s_k, int s_n, int bias_batch, int bias_n UP_PARAMETERS) {
#if !PAIRS
    [[maybe_unused]] const TensorMap& w_up = w;
    [[maybe_unused]] const float* const w_up_scale = w_scale;
#endif
    extern __shared__ __align__(1024) char memory_[];
    const uint32_t base = shared_address(memory_);
    let_next_begin();
    auto full_w = [&](int stage) { return base + AT_BARRIERS + stage * 16; };
    auto empty_w = [&](int stage) { return base + AT_BARRIERS + stage * 16 + 8; };
    auto full_x = [&](int stage) { return base + AT_BARRIERS + (W_STAGES + stage) * 16; };
    auto empty_x = [&](int stage) { return base + AT_BARRIERS + (W_STAGES + stage) * 16 + 8; };
    auto full_pair = [&](int pair) { return base + AT_BARRIERS + (W_STAGES + X_STAGES + pair) * 16; };
    auto empty_pair = [&](int pair) { return base + AT_BARRIERS + (W_STAGES + X_STAGES + pair) * 16 + 8; };

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    const int lane = lane_index();

    // Prologue: initialize the mbarriers.
    if (threadIdx.x == (PERSISTENT ? MATH * WARPGROUP : 0)) {
        prefetch_map(w);
        if constexpr (GATED) prefetch_map(w_up);
        prefetch_map(x);
        prefetch_map(out);
        for (int stage = 0; stage < W_STAGES; ++stage) {
            barrier_init(full_w(stage), 1);
            barrier_init(empty_w(stage), MATH / K_PARTS * 4);
        }
        for (int stage = 0; stage < X_STAGES; ++stage) {
            barrier_init(full_x(stage), 1);
            barrier_init(empty_x(stage), MATH / K_PARTS * 4);
        }
        for (int pair = 0; pair < PAIRS; ++pair) {
            barrier_init(full_pair(pair), MATH * 4);
            barrier_init(empty_pair(pair), 1);
        }
        barrier_init_fence();
    }
    __syncthreads();

    const Walk walk(problem, nullptr);
    const int begin = blockIdx.x, step = PERSISTENT ? gridDim.x : problem.tiles();
    auto load_w = [&](const Tile& tile, int stage, int k) {
        barrier_expect(full_w(stage), W_BYTES);
        const uint32_t to = base + stage * W_BYTES;
        tma_load(to, w, full_w(stage), k * BK, tile.n, tile.batch * w_batched);
        if constexpr (GATED) tma_load(to + 64 * BK, w_up, full_w(stage), k * BK, tile.n, tile.batch * w_batched);
    };
    auto load_x = [&](const Tile& tile, int stage, int k, int slice) {
        const uint32_t to = base + AT_X + stage * X_BYTES, barrier = full_x(stage);
        const int m = tile.m + slice * WIDTH, batch = tile.batch * x_batched;
        barrier_expect(barrier, X_BYTES);
        tma_load(to, x, barrier, k * BK, m, batch);
        tma_load(to + X_HALF, x, barrier, k * BK + 64, m, batch);
    };
    auto prefetch_w = [&](const Tile& tile, int from) {
        for (int k = from; k < min(PREFETCHED, tile.k_stop); ++k) {
            tma_prefetch(w, k * BK, tile.n, tile.batch * w_batched);
            if constexpr (GATED) tma_prefetch(w_up, k * BK, tile.n, tile.batch * w_batched);
        }
    };
    RingOf<W_STAGES> ring_w;
    RingOf<X_STAGES> ring_x;
    [[maybe_unused]] RingOf<GATED ? PAIRS : 1> pairs;
    if (PERSISTENT && warpgroup == MATH) {
        // Producer: one thread issues the TMA loads.
        if constexpr (MATH == 2) give_registers<GATED ? 40 : 24>();
        if (warp == 0 && elect()) {
            prefetch_w(walk.at(begin), 0);
            wait_for_launches();
            for (int index = begin; walk.reaches(index); index += step) {
                const Tile tile = walk.at(index);
#pragma unroll 1  // this warpgroup has few registers
                for (int k = tile.k_start; k < tile.k_stop; ++k, ring_w.advance()) {
                    barrier_wait(empty_w(ring_w.stage), ring_w.parity ^ 1);
                    load_w(tile, ring_w.stage, k);
                    for (int slice = 0; slice < SLICES; ++slice, ring_x.advance()) {
                        barrier_wait(empty_x(ring_x.stage), ring_x.parity ^ 1);
                        load_x(tile, ring_x.stage, k, slice);
                    }
                }
            }
        }
        if constexpr (GATED) {
            if (warp > 0) {
                // SiLU. A unit is what a warp of each consumer has of 16 rows. The product takes the place of the gate.
                constexpr int UNITS = OUT_ROWS / 16 * 4, ROUNDS = (UNITS + SILU_WARPS - 1) / SILU_WARPS;
                wait_for_launches();
                for (int index = begin; walk.reaches(index); index += step) {
                    const Tile tile = walk.at(index);
#pragma unroll 1
                    for (int part = 0; part < BM / OUT_ROWS; ++part, pairs.advance()) {
                        const uint32_t gate = base + AT_OUT + pairs.stage * 2 * OUT_BYTES;
                        barrier_wait(full_pair(pairs.stage), pairs.parity);
                        uint4 rows[ROUNDS];
#pragma unroll
                        for (int i = 0; i < ROUNDS; ++i) {
                            const int unit = i * SILU_WARPS + warp - 1;
                            const uint32_t from = gate + (unit * 32 + lane) * 16;
                            if (unit < UNITS)
                                rows[i] = gated<OutType>(load_shared_words(from), load_shared_words(from + OUT_BYTES));
                        }
                        named_sync<SILU_WARPS * 32>(1);
#pragma unroll
                        for (int i = 0; i < ROUNDS; ++i) {
                            const int unit = i * SILU_WARPS + warp - 1;
                            const int matrix = lane / 8, row = 8 * (unit / 4 * 2 + matrix / 2) + lane % 8;
                            const uint32_t to = gate + row * 128 + ((unit % 4 * 2 + matrix % 2) ^ (row % 8)) * 16;
                            if (unit < UNITS) store_matrices<true>(to, rows[i].x, rows[i].y, rows[i].z, rows[i].w);
                        }
                        fence_async();
                        named_sync<SILU_WARPS * 32>(1);
                        if (warp == 1 && lane == 0) {
                            tma_store(out, gate, tile.n, tile.m + part * OUT_ROWS, tile.batch);
                            tma_store_commit();
                            tma_store_wait_read<0>();
                            barrier_arrive(empty_pair(pairs.stage));
                        }
                        __syncwarp();
                    }
                }
            }
        }
    } else {
        if constexpr (PERSISTENT && MATH == 2) take_registers<GATED ? 232 : 240>();
        if constexpr (!PERSISTENT) {
            // Prologue: issue the loads of the first W_STAGES K tiles, the weight's before the wait if it is constant.
            if (threadIdx.x < 32 && elect()) {
                const Tile tile = walk.at(begin);
                const int ahead = min(W_STAGES, tile.k_stop);
                if constexpr (W_CONSTANT) {
                    for (int k = 0; k < ahead; ++k) load_w(tile, k, k);
                }
                if constexpr (!W_CONSTANT || !IN_FLIGHT) prefetch_w(tile, W_CONSTANT ? ahead : 0);
                wait_for_launches();
                for (int k = 0; k < ahead; ++k) {
                    if constexpr (!W_CONSTANT) load_w(tile, k, k);
                    for (int slice = 0; slice < SLICES; ++slice) load_x(tile, k * SLICES + slice, k, slice);
                }
            }
            __syncwarp();
        }
        // Consumer: the warpgroup's first column, and its part of K.
        const int column = K_PARTS > 1 || GATED ? 0 : warpgroup * 64, part = K_PARTS > 1 ? warpgroup : 0;
        const float* const own_scale = GATED && warpgroup == 1 ? w_up_scale : w_scale;
        if (K_PARTS > 1 && part == 1) ring_w.advance();
        for (int slice = 0; slice < part * SLICES; ++slice) ring_x.advance();
        const int line = column + warp * 16 + lane / 4;  // the thread's column of w in the tile; it also has line + 8

        struct Pair {
            float upper, lower;
        };
        // The scales of the thread's two columns in a K tile, or for all of K where HOLDS.
        auto scales_of = [&](const Tile& tile, int k) {
            const float* const scales = own_scale + int64_t(tile.batch * w_batched) * s_batch + int64_t(k) * s_k;
            const int n = tile.n + line, chunk = tile.n + column;
            Pair pair = {0.0f, 0.0f};
            if constexpr (SCALE == BLOCK) {
                if (k < tile.k_stop && chunk < problem.N)
                    pair.upper = pair.lower = load_constant(scales + int64_t(chunk / 128) * s_n);
            } else {
                if (k < tile.k_stop && n < problem.N) pair.upper = load_constant(scales + int64_t(n) * s_n);
                if (k < tile.k_stop && n + 8 < problem.N) pair.lower = load_constant(scales + int64_t(n + 8) * s_n);
            }
            return pair;
        };
        // For 64 columns that have one scale a K tile: the scale of K tile `first + lane`.
        auto run_of = [&](const Tile& tile, int first) {
            const int k = first + lane, chunk = tile.n + column;
            if (k >= tile.k_stop || chunk >= problem.N) return 0.0f;
            return load_constant(own_scale + int64_t(tile.batch * w_batched) * s_batch + int64_t(k) * s_k +
                                 int64_t(chunk / 128) * s_n);
        };
        auto bias_of = [&]([[maybe_unused]] const Tile& tile) {
            Pair pair = {0.0f, 0.0f};
            if constexpr (HAS_BIAS) {
                const int n = tile.n + line;
                const BiasType* biases = bias + int64_t(tile.batch) * bias_batch;
                if (n < problem.N) pair.upper = float(biases[int64_t(n) * bias_n]);
                if (n + 8 < problem.N) pair.lower = float(biases[int64_t(n + 8) * bias_n]);
            }
            return pair;
        };

        // Persistent tiles have registers for the scales and biases of the epilogue only in the epilogue.
        constexpr bool EARLY = !PERSISTENT;
        if constexpr (!W_CONSTANT) wait_for_launches();
        if (TURNS && warpgroup == 1) pass_turn(1);  // the first turn is warpgroup 0's
        [[maybe_unused]] int stored = 0;  // parts of earlier tiles
        for (int index = begin; walk.reaches(index); index += step) {
            const Tile tile = walk.at(index);
            float acc[SLICES][WIDTH / 2] = {};
            Pair next = {1.0f, 1.0f}, last = {1.0f, 1.0f}, added = {0.0f, 0.0f};
            [[maybe_unused]] float run = 0.0f, later = 0.0f;
            if constexpr (IN_RUNS)
                run = run_of(tile, 0), later = run_of(tile, RUN);
            else if constexpr (!HOLDS || EARLY)
                next = scales_of(tile, HOLDS ? 0 : part);
            if constexpr (HOLDS) last = next;
            if constexpr (EARLY && !W_CONSTANT) added = bias_of(tile);

            // Main loop.
            for (int k = tile.k_start + part; k < tile.k_stop; k += K_PARTS) {
                const int stage_w = ring_w.stage;
                [[maybe_unused]] const uint32_t parity = ring_w.parity;
                if constexpr (IN_RUNS) {
                    if (k > 0 && k % RUN == 0) run = later, later = run_of(tile, k + RUN);
                    next.upper = next.lower = __shfl_sync(~0u, run, k % RUN);
                }
                [[maybe_unused]] const Pair scale = next;
                barrier_wait(full_w(stage_w), parity);
                for (int i = 0; i < K_PARTS; ++i) ring_w.advance();
                if constexpr (!HOLDS && !IN_RUNS) next = scales_of(tile, k + K_PARTS);
                [[maybe_unused]] uint32_t powers[2];
                [[maybe_unused]] Pair change;
                if constexpr (IN_UNITS) {
                    Pair unit;
                    powers[0] = split_scale(scale.upper, unit.upper);
                    powers[1] = split_scale(scale.lower, unit.lower);
                    change = {__fdividef(last.upper, unit.upper), __fdividef(last.lower, unit.lower)};
                    last = unit;
                }
                // Widen the K tile of w into the fragments of wgmma's left operand.
                uint32_t a[BK / 16][4];
                auto convert = [&](uint32_t bytes, int half, uint32_t& low, uint32_t& high) {
                    if constexpr (ROUNDED) {
                        widen_scaled<FP8>(bytes, scale.upper, low, high);  // of both columns
                    } else {
                        widen<XType, FP8>(bytes, low, high);
                    }
                    if constexpr (IN_UNITS) {
                        low = multiply_pairs<XType>(low, powers[half]);
                        high = multiply_pairs<XType>(high, powers[half]);
                    }
                };
                widen_lines(a, base + stage_w * W_BYTES + (GATED ? warpgroup * 64 * BK : 0), line, convert);
                settle_fragments(a);
                if constexpr (W_CONSTANT) {  // which has one tile a block: x is read from here on
                    if (k == tile.k_start + part) {
                        wait_for_launches();
                        added = bias_of(tile);
                    }
                }
                [[maybe_unused]] const RingOf<X_STAGES> first_x = ring_x;
                auto start = [&](float (&d)[WIDTH / 2], bool onto) {
                    const int stage = ring_x.stage;
                    barrier_wait(full_x(stage), ring_x.parity);
                    const uint32_t from = base + AT_X + stage * X_BYTES;
                    const uint64_t low = matrix_descriptor(from), high = matrix_descriptor(from + X_HALF);
                    ring_x.advance();
                    fence_registers(d);
                    wgmma_fence();
#pragma unroll
                    for (int step = 0; step < BK / 16; ++step)
                        wgmma(d, a[step], (step < 4 ? low : high) + step % 4 * 2, onto || step > 0);
                    wgmma_commit();
                    fence_registers(d);
                    return stage;
                };
                auto release = [&](int stage) {
                    if (!IN_FLIGHT && lane == 0) barrier_arrive(empty_x(stage));
                };
                // Releases the stage of w, and only once a product has started, which needs all fragments: an arrival
                // does not wait for loads, and TMA could overwrite the stage while some of them are in flight.
                auto release_w = [&] {
                    if (!IN_FLIGHT && lane == 0) barrier_arrive(empty_w(stage_w));
                };
                int used[SLICES];  // the stages of x that the products read
                const bool onto = k > tile.k_start + part;
                if (IN_UNITS && onto) {
#pragma unroll
                    for (int i = 0; i < BM / 2; ++i)
                        acc[i / (WIDTH / 2)][i % (WIDTH / 2)] *= i % 4 < 2 ? change.upper : change.lower;
                }
                if constexpr (TURNS) take_turn(warpgroup);
                // Multiply, straight into the accumulators or into a temporary that is promoted.
                if constexpr (HOLDS || ROUNDED || IN_UNITS) {
#pragma unroll
                    for (int slice = 0; slice < SLICES; ++slice) {
                        used[slice] = start(acc[slice], onto);
                        if (slice == 0) release_w();
                    }
                    if constexpr (TURNS) pass_turn(warpgroup);
#pragma unroll
                    for (int slice = 0; slice < SLICES; ++slice) {
                        if (SLICES > 1 && slice == 0) wgmma_wait<1>();  // all products but the last
                        if (slice + 1 == SLICES) wgmma_wait<0>();
                        fence_registers(acc[slice]);
                        release(used[slice]);
                    }
                } else {
                    float d[WIDTH / 2];
#pragma unroll
                    for (int slice = 0; slice < SLICES; ++slice) {
                        used[slice] = start(d, false);
                        if (slice == 0) release_w();
                        if (TURNS && slice + 1 == SLICES) pass_turn(warpgroup);
                        wgmma_wait<0>();
                        fence_registers(d);
                        release(used[slice]);
                        // As splitk_a16w8.cu promotes, for the same bits.
#pragma unroll
                        for (int i = 0; i < WIDTH / 2; ++i)
                            acc[slice][i] = __fmaf_rn(d[i], i % 4 < 2 ? scale.upper : scale.lower, acc[slice][i]);
                    }
                }
                for (int i = 0; i < (K_PARTS - 1) * SLICES; ++i) ring_x.advance();
                if constexpr (!PERSISTENT && !IN_FLIGHT) {  // refill the stages of all parts of K
                    if (k + W_STAGES < tile.k_stop) {
                        if (threadIdx.x < 32 && elect()) {
                            RingOf<W_STAGES> to_w = {stage_w, parity};
                            RingOf<X_STAGES> to_x = first_x;
                            for (int next = k + W_STAGES; next < min(k + W_STAGES + K_PARTS, tile.k_stop); ++next) {
                                barrier_wait(empty_w(to_w.stage), to_w.parity);
                                load_w(tile, to_w.stage, next);
                                to_w.advance();
                                for (int slice = 0; slice < SLICES; ++slice, to_x.advance()) {
                                    barrier_wait(empty_x(to_x.stage), to_x.parity);
                                    load_x(tile, to_x.stage, next, slice);
                                }
                            }
                        }
                        __syncwarp();
                    }
                }
            }

            // Reduce: add the sums of both parts of K, in the order of K.
            if constexpr (K_PARTS > 1) {
                float* const sums = reinterpret_cast<float*>(memory_) + threadIdx.x % WARPGROUP;
                __syncthreads();  // both warpgroups have read their stages
                if (part == 1) {
#pragma unroll
                    for (int i = 0; i < BM / 2; ++i) sums[i * WARPGROUP] = acc[i / (WIDTH / 2)][i % (WIDTH / 2)];
                }
                __syncthreads();
                if (part == 1) break;
#pragma unroll
                for (int i = 0; i < BM / 2; ++i) acc[i / (WIDTH / 2)][i % (WIDTH / 2)] += sums[i * WARPGROUP];
            }
            if constexpr (HOLDS && !EARLY) last = scales_of(tile, 0);
            if constexpr (!EARLY) added = bias_of(tile);
            // Epilogue: scale, add the bias and cast; then store OUT_ROWS rows at a time by TMA. The parts alternate
            // between two buffers of rows of 64 columns, into which stmatrix transposes them; those of gate and up go
            // into a pair, each thread's values side by side.
#pragma unroll
            for (int part = 0; part < BM / OUT_ROWS; ++part) {
                const uint32_t buffer = GATED ? base + AT_OUT + (pairs.stage * 2 + warpgroup) * OUT_BYTES
                                              : base + AT_OUT + (warpgroup * 2 + (stored + part) % 2) * OUT_BYTES;
                if constexpr (GATED) {
                    barrier_wait(empty_pair(pairs.stage), pairs.parity ^ 1);
                } else {
                    if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<1>();
                    warpgroup_sync(1 + warpgroup);
                }
                const float (&sum)[WIDTH / 2] = acc[part * OUT_ROWS / WIDTH];
#pragma unroll
                for (int j = 0; j < OUT_ROWS / 8; j += 2) {
                    uint32_t packed[4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float* v = sum + (part * OUT_ROWS % WIDTH / 8 + j + i) * 4;
                        packed[2 * i] = pack<OutType>(v[0] * last.upper + added.upper, v[1] * last.upper + added.upper);
                        packed[2 * i + 1] =
                            pack<OutType>(v[2] * last.lower + added.lower, v[3] * last.lower + added.lower);
                    }
                    if constexpr (GATED) {
                        const uint32_t at = buffer + (j / 2 * WARPGROUP + threadIdx.x % WARPGROUP) * 16;
                        store_shared(at, make_uint4(packed[0], packed[1], packed[2], packed[3]));
                        continue;
                    }
                    const int matrix = lane / 8, row = 8 * (j + matrix / 2) + lane % 8;
                    const int piece = (warp * 2 + matrix % 2) ^ (row % 8);
                    store_matrices<true>(buffer + row * 128 + piece * 16, packed[0], packed[1], packed[2], packed[3]);
                }
                if constexpr (GATED) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(full_pair(pairs.stage));
                    pairs.advance();
                    continue;
                }
                fence_async();
                warpgroup_sync(1 + warpgroup);
                if (threadIdx.x % WARPGROUP == 0) {
                    tma_store(out, buffer, tile.n + warpgroup * 64, tile.m + part * OUT_ROWS, tile.batch);
                    tma_store_commit();
                }
            }
            if constexpr (BM / OUT_ROWS % 2) stored ^= 1;
        }
        if (TURNS && warpgroup == 0) take_turn(0);  // so that both warpgroups have met equally often
        if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<0>();
    }
}

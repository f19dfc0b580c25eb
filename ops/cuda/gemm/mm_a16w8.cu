// Many rows by an FP8 weight on Hopper: out (B, M, N) = x (B, M, K) · (w (B, K, N) * w_scale) + bias, x of 16 bits.
//
// Computed transposed, outᵀ = wᵀ xᵀ: the left operand of wgmma may come from registers, where wᵀ has just been widened from
// FP8. MATH warpgroups of a block multiply, 64 columns of w each; K_PARTS of them have the same columns, and every other
// k-block of 128. A warpgroup widens a k-block of its columns, 32 registers a thread, and multiplies it by SLICES parts of
// WIDTH rows of x. With TURNS two warpgroups multiply by turns: while one does, the other widens. ONCE: K is at most 128,
// and so has one scale.
//
// Where the scale changes along K, each product goes into a temporary that is scaled and added. Those of more than 128 rows
// would not fit into registers as a whole, and their parts would have to wait for one another. So what is widened is
// multiplied by the power of two in its scale, exactly; sums are in units of the rest, from 1 to 2, and are multiplied by
// its change before the next k-block.
//
// Both operands come by TMA, w into W_STAGES and slices of x into X_STAGES: those of w are free again once they are widened.
// Of large tiles a block is PERSISTENT: a warpgroup that copies keeps the stages full and leaves its registers to the others.
// Small ones have a block each, and RESIDENT of them on a multiprocessor hide one another's latency; with IN_FLIGHT there
// is room for all of K. The launch begins while the one before it ends, and until then has the weight brought to the L2; of
// a weight that is constant (W_CONSTANT: nothing that may still run writes it or its scales) such a block fills the stages,
// and widens the first of them.
//
// Macros: INPUT (BF16, FP16; and in the generated wgmma), FP8 of the enum Fp8, SCALE (LINE, VECTOR, BLOCK as in
// gemv_a16w8.cu), MATH (1 or 2), K_PARTS (1 or 2), WIDTH, SLICES, W_STAGES, X_STAGES, TURNS, ONCE, PERSISTENT,
// IN_FLIGHT, RESIDENT, GROUP, W_CONSTANT, OUT (BF16, FP16), BIAS (0, BF16, FP16, FP32).
#include "a16w8.cuh"
#include "groups.cuh"

#define GROUPED DENSE
#define CLUSTER 1
#define SPLIT 1
#define SHARE_B 1
#define B_ONCE 0

constexpr int WARPGROUP = 128;
constexpr int THREADS = (MATH + PERSISTENT) * WARPGROUP;
constexpr int BK = 128;
constexpr int BM = WIDTH * SLICES;  // rows of x
constexpr int BN = 64 * MATH / K_PARTS;  // columns of w
constexpr int W_BYTES = BN * BK;
constexpr int X_HALF = WIDTH * 64 * 2;  // 64 of K, rows of 128 bytes
constexpr int X_BYTES = 2 * X_HALF;  // of a slice
constexpr int OUT_ROWS = 32;
constexpr int OUT_BYTES = OUT_ROWS * 128;  // of 64 columns
constexpr bool HOLDS = SCALE == LINE || ONCE;  // a scale, for all of K
constexpr bool IN_UNITS = !HOLDS && BM > 128;  // are sums, of what powers of two leave of the scales
constexpr int PREFETCHED = 8;  // k-blocks
static_assert(WIDTH % OUT_ROWS == 0, "the accumulators of a slice leave as whole parts");
static_assert(!PERSISTENT || BM / OUT_ROWS % 2 == 0, "the buffers of parts take turns over the border of tiles too");
static_assert(PERSISTENT || X_STAGES == W_STAGES * SLICES, "a k-block takes the place of a k-block");
static_assert(K_PARTS == 1 || (K_PARTS == 2 && MATH == 2 && !PERSISTENT), "sums of two warpgroups");
static_assert(K_PARTS == 1 || BM <= 128, "two parts of K would have units of their own");
static_assert(!W_CONSTANT || !PERSISTENT, "of a later tile the weight is read after the wait in any case");
static_assert(!TURNS || (PERSISTENT && MATH == 2), "one of two warpgroups");

constexpr int AT_X = W_STAGES * W_BYTES;
constexpr int AT_OUT = AT_X + X_STAGES * X_BYTES;
constexpr int AT_BARRIERS = AT_OUT + 2 * BN / 64 * OUT_BYTES;
static_assert(K_PARTS == 1 || AT_OUT >= BM * 64 * 4, "sums take the place of the stages");

#include "ring.cuh"
#include "tiles.cuh"

// Of two warpgroups, each of which passes one barrier when the other has arrived there.
INLINE void take_turn(int warpgroup) { named_sync<256>(3 + warpgroup); }
INLINE void pass_turn(int warpgroup) { named_arrive<256>(4 - warpgroup); }

// A scale's power of two as a pair, one by which every value of FP8 is still exact in XType; and the rest, from 1 to 2 but
// for scales beyond such powers. 0 is 0 times 1, so that the next rest can be divided by it.
INLINE uint32_t split_scale(float scale, float& rest) {
    constexpr int LEAST = IS_BF16<XType> ? -100 : FP8 == Fp8::E4M3 ? -15 : -8;  // FP8 has values from 2^-9 and 2^-16 on
    constexpr int MOST = IS_BF16<XType> ? 100 : FP8 == Fp8::E4M3 ? 7 : 0;
    const uint32_t exponent = __float_as_uint(scale) >> 23 & 0xff;
    const uint32_t power = min(max(exponent, 127u + LEAST), 127u + MOST);
    rest = scale * __uint_as_float((254 - power) << 23);
    const bool zero = rest == 0.0f;
    if (zero) rest = 1.0f;
    const float factor = zero ? 0.0f : __uint_as_float(power << 23);
    return pack<XType>(factor, factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mm_a16w8(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* w_scale,
             const BiasType* bias, const __grid_constant__ TensorMap out, const Problem problem, int x_batched,
             int w_batched, int s_batch, int s_k, int s_n, int bias_batch, int bias_n) {
    extern __shared__ __align__(1024) char memory_[];
    const uint32_t base = shared_address(memory_);
    let_next_begin();
    auto full_w = [&](int stage) { return base + AT_BARRIERS + stage * 16; };
    auto empty_w = [&](int stage) { return base + AT_BARRIERS + stage * 16 + 8; };
    auto full_x = [&](int stage) { return base + AT_BARRIERS + (W_STAGES + stage) * 16; };
    auto empty_x = [&](int stage) { return base + AT_BARRIERS + (W_STAGES + stage) * 16 + 8; };

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    const int lane = lane_index();

    if (threadIdx.x == (PERSISTENT ? MATH * WARPGROUP : 0)) {
        prefetch_map(w);
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
        barrier_init_fence();
    }
    __syncthreads();

    const Walk walk(problem, nullptr);
    const int begin = blockIdx.x, step = PERSISTENT ? gridDim.x : problem.tiles();
    auto load_w = [&](const Tile& tile, int stage, int k) {
        barrier_expect(full_w(stage), W_BYTES);
        tma_load(base + stage * W_BYTES, w, full_w(stage), k * BK, tile.n, tile.batch * w_batched);
    };
    auto load_x = [&](const Tile& tile, int stage, int k, int slice) {
        const uint32_t to = base + AT_X + stage * X_BYTES, barrier = full_x(stage);
        const int m = tile.m + slice * WIDTH, batch = tile.batch * x_batched;
        barrier_expect(barrier, X_BYTES);
        tma_load(to, x, barrier, k * BK, m, batch);
        tma_load(to + X_HALF, x, barrier, k * BK + 64, m, batch);
    };
    auto prefetch_w = [&](const Tile& tile, int from) {
        for (int k = from; k < min(PREFETCHED, tile.k_stop); ++k)
            tma_prefetch(w, k * BK, tile.n, tile.batch * w_batched);
    };
    RingOf<W_STAGES> ring_w;
    RingOf<X_STAGES> ring_x;
    if (PERSISTENT && warpgroup == MATH) {
        if constexpr (MATH == 2) give_registers<24>();
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
    } else {
        if constexpr (PERSISTENT && MATH == 2) take_registers<240>();
        if constexpr (!PERSISTENT) {
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
        // The warpgroup's columns and its part of K.
        const int column = K_PARTS > 1 ? 0 : warpgroup * 64, part = K_PARTS > 1 ? warpgroup : 0;
        if (K_PARTS > 1 && part == 1) ring_w.advance();
        for (int slice = 0; slice < part * SLICES; ++slice) ring_x.advance();
        const int line = column + warp * 16 + lane / 4;  // column of w in the tile; also line + 8

        struct Pair {
            float upper, lower;
        };
        // Of a k-block; of all where they hold for it.
        auto scales_of = [&](const Tile& tile, int k) {
            const float* const scales = w_scale + int64_t(tile.batch * w_batched) * s_batch + int64_t(k) * s_k;
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

        // Large tiles have registers for what a tile ends with only where it ends.
        constexpr bool EARLY = !PERSISTENT;
        if constexpr (!W_CONSTANT) wait_for_launches();
        if (TURNS && warpgroup == 1) pass_turn(1);  // the first is the other's
        for (int index = begin; walk.reaches(index); index += step) {
            const Tile tile = walk.at(index);
            float acc[SLICES][WIDTH / 2] = {};
            Pair next = {1.0f, 1.0f}, last = {1.0f, 1.0f}, added = {0.0f, 0.0f};
            if constexpr (!HOLDS || EARLY) next = scales_of(tile, HOLDS ? 0 : part);
            if constexpr (HOLDS) last = next;
            if constexpr (EARLY && !W_CONSTANT) added = bias_of(tile);

            for (int k = tile.k_start + part; k < tile.k_stop; k += K_PARTS) {
                const int stage_w = ring_w.stage;
                [[maybe_unused]] const uint32_t parity = ring_w.parity;
                [[maybe_unused]] const Pair scale = next;
                barrier_wait(full_w(stage_w), parity);
                for (int i = 0; i < K_PARTS; ++i) ring_w.advance();
                if constexpr (!HOLDS) next = scales_of(tile, k + K_PARTS);
                [[maybe_unused]] uint32_t powers[2];
                [[maybe_unused]] Pair change;
                if constexpr (IN_UNITS) {
                    Pair unit;
                    powers[0] = split_scale(scale.upper, unit.upper);
                    powers[1] = split_scale(scale.lower, unit.lower);
                    change = {__fdividef(last.upper, unit.upper), __fdividef(last.lower, unit.lower)};
                    last = unit;
                }
                uint32_t a[BK / 16][4];
                widen_lines<FP8>(a, base + stage_w * W_BYTES, line, [&]([[maybe_unused]] uint32_t (&fragment)[4]) {
                    if constexpr (IN_UNITS) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) fragment[i] = multiply_pairs<XType>(fragment[i], powers[i % 2]);
                    }
                });
                settle_fragments(a);
                if constexpr (W_CONSTANT) {  // a block has one tile
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
                // Not before a product has begun, for which all of w must be there: an arrival does not wait for loads, and
                // the copy engine might fill the stage while some are under way.
                auto release_w = [&] {
                    if (!IN_FLIGHT && lane == 0) barrier_arrive(empty_w(stage_w));
                };
                int used[SLICES];  // stages of x
                const bool onto = k > tile.k_start + part;
                if (IN_UNITS && onto) {
#pragma unroll
                    for (int i = 0; i < BM / 2; ++i)
                        acc[i / (WIDTH / 2)][i % (WIDTH / 2)] *= i % 4 < 2 ? change.upper : change.lower;
                }
                if constexpr (TURNS) take_turn(warpgroup);
                if constexpr (HOLDS || IN_UNITS) {
#pragma unroll
                    for (int slice = 0; slice < SLICES; ++slice) {
                        used[slice] = start(acc[slice], onto);
                        if (slice == 0) release_w();
                    }
                    if constexpr (TURNS) pass_turn(warpgroup);
#pragma unroll
                    for (int slice = 0; slice < SLICES; ++slice) {
                        if (SLICES > 1 && slice == 0) wgmma_wait<1>();  // all but the last
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
#pragma unroll
                        for (int j = 0; j < WIDTH / 8; ++j) {
                            acc[slice][4 * j + 0] += scale.upper * d[4 * j + 0];
                            acc[slice][4 * j + 1] += scale.upper * d[4 * j + 1];
                            acc[slice][4 * j + 2] += scale.lower * d[4 * j + 2];
                            acc[slice][4 * j + 3] += scale.lower * d[4 * j + 3];
                        }
                    }
                }
                for (int i = 0; i < (K_PARTS - 1) * SLICES; ++i) ring_x.advance();
                if constexpr (!PERSISTENT && !IN_FLIGHT) {  // what comes next, in the place of this and the other part
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

            if constexpr (K_PARTS > 1) {
                float* const sums = reinterpret_cast<float*>(memory_) + threadIdx.x % WARPGROUP;
                __syncthreads();  // both have read their stages
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
            // Parts of OUT_ROWS rows leave through two buffers in turn: rows of 64 columns, turned around on the way.
#pragma unroll
            for (int part = 0; part < BM / OUT_ROWS; ++part) {
                const uint32_t buffer = base + AT_OUT + (warpgroup * 2 + part % 2) * OUT_BYTES;
                if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<1>();
                warpgroup_sync(1 + warpgroup);
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
                    const int matrix = lane / 8, row = 8 * (j + matrix / 2) + lane % 8;
                    const int piece = (warp * 2 + matrix % 2) ^ (row % 8);
                    store_matrices<true>(buffer + row * 128 + piece * 16, packed[0], packed[1], packed[2], packed[3]);
                }
                fence_async();
                warpgroup_sync(1 + warpgroup);
                if (threadIdx.x % WARPGROUP == 0) {
                    tma_store(out, buffer, tile.n + warpgroup * 64, tile.m + part * OUT_ROWS, tile.batch);
                    tma_store_commit();
                }
            }
        }
        if (TURNS && warpgroup == 0) take_turn(0);  // so that each has met the other as often
        if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<0>();
    }
}

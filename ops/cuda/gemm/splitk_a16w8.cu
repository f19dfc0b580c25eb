// Rows by an FP8 weight on Hopper, with K split over a cluster: out (B, M, N) = x (B, M, K) · (w (B, K, N) * w_scale) +
// bias, x of 16 bits.
//
// As in mm_a16w8.cu the product is computed transposed, outᵀ = wᵀ xᵀ: a warpgroup widens 64 columns of w from FP8 into
// registers, one K tile of 128 at a time, which are the left operand of wgmma; ROWS rows of x are the right one. It
// widens the next K tile while the tensor core multiplies. Each product is scaled and added in float32.
//
// Decomposition. A cluster of CLUSTER blocks has BN columns of w and up to ROWS rows of x, and its blocks share K. They
// exchange their sums by `exchange.cuh`. TMA brings `x_rows` rows: filling rows past the end with zeros takes longer than
// loading them. The other rows of a stage are never written; their products are not stored.
//
// Pipeline. A producer warp keeps STAGES K tiles of both operands in flight by TMA. Where the stages hold the block's
// whole part of K there is no producer warp, and the consumers widen the first HELD K tiles while x is on its way.
//
// Overlap: as in `decode_tiles.cuh`. If the weight is constant, the K tiles that are HELD are widened before the wait.
//
// Shared memory: w (STAGES, BN, BK), x (STAGES, 2, ROWS, 64), the cluster's sums, the mbarriers, scales of w.
//
// Macros: INPUT (BF16 or FP16, also the type of the generated `wgmma`, which has ROWS columns), OUT and BIAS of the
// enum Element; FP8 of the enum Fp8; SCALE (LINE, VECTOR, BLOCK: see scale_kinds.cuh); ROWS (a multiple of 16), TILES
// (1), WARPS_N (4 are a warpgroup), WARPS_K (1), STAGES, CLUSTER, RESIDENT (blocks a multiprocessor), W_CONSTANT, LATE,
// HELD (stages that are widened ahead, at least two of several, or 0).
#include "decode_tiles.cuh"
#include "exchange.cuh"

constexpr int PIECES = BK / 16;  // of 16 of K, the depth of a wgmma
constexpr int SLOTS = HELD > 0 ? HELD : 2;  // K tiles of w in registers
constexpr int COPIES = HELD > 0 ? 0 : 32;  // threads of the producer warp; stages that are filled once need none
static_assert(HELD <= STAGES && (HELD != 1 || STAGES == 1));

constexpr int W_BYTES = BN * BK, X_HALF = ROWS * 128, X_BYTES = 2 * X_HALF;  // of a stage; x in halves of 64 of K
constexpr int AT_X = STAGES * W_BYTES;
constexpr int AT_ARRIVED = AT_X + STAGES * X_BYTES;
constexpr int AT_FULL = AT_ARRIVED + SUMS_BYTES;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;  // with HELD, the mbarriers of x
constexpr int AT_SENT = AT_EMPTY + STAGES * 8;
constexpr int AT_SCALES = (AT_SENT + 8 + 15) / 16 * 16;

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS + COPIES, RESIDENT)
    splitk_a16w8(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* w_scale,
                 const BiasType* bias, OutType* out, int M, int N, int K, int prefetched, int x_rows, int x_batched,
                 int w_batched, int s_batch, int s_k, int s_n, int bias_batch, int bias_n) {
    if constexpr (!LATE) let_next_begin();
    char* const stages = swizzled_memory();
    const uint32_t base = shared_address(stages);
    auto full = [&](int stage) { return base + AT_FULL + stage * 8; };
    auto empty = [&](int stage) { return base + AT_EMPTY + stage * 8; };
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so that the compiler knows that a warp branches as one
    const int lane = threadIdx.x % 32;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int tile_n = blockIdx.x / CLUSTER * BN, first_m = blockIdx.y * x_rows, matrix = blockIdx.z;
    const int rows = min(M - first_m, x_rows), x_bytes = x_rows * 256;  // of a stage, which x may not fill
    const uint32_t steps = (K + BK - 1) / BK;
    const int start = steps * rank / CLUSTER, count = HELD > 0 ? STAGES : steps * (rank + 1) / CLUSTER - start;
    // (count, BN) where SCALE is VECTOR, (count, BN / 64) for BLOCK, (BN) for LINE.
    float* const w_scales = reinterpret_cast<float*>(stages + AT_SCALES);

    auto load_w = [&](int stage, int step) {
        barrier_expect(full(stage), HELD > 0 ? W_BYTES : W_BYTES + x_bytes);
        tma_load(base + stage * W_BYTES, w, full(stage), (start + step) * BK, tile_n, matrix * w_batched);
    };
    auto load_x = [&](int stage, int step) {
        const uint32_t barrier = HELD > 0 ? empty(stage) : full(stage);
        if constexpr (HELD > 0) barrier_expect(barrier, x_bytes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            tma_load(base + AT_X + stage * X_BYTES + half * X_HALF, x, barrier, (start + step) * BK + half * 64,
                     first_m, matrix * x_batched);
    };
    auto prefetch_w = [&](int step) { tma_prefetch(w, (start + step) * BK, tile_n, matrix * w_batched); };
    if (threadIdx.x == INITIALIZING)
        init_barriers(base + AT_FULL, STAGES, bytes_of_sums(rows, rank), HELD > 0 ? 1 : WARPS);
    begin_loads(warp, load_w, prefetch_w);
    if (HELD == 0 && warp == WARPS) {
        if (elect()) produce<true>(count, prefetched, empty, load_w, load_x, prefetch_w);
        return;
    }

    // Consumers.
    auto read = [&] {
        const float* const from = w_scale + int64_t(matrix * w_batched) * s_batch;
        read_scales<BN, THREADS>(w_scales, from, start, count, tile_n, N, s_k, s_n);
        sync_first<THREADS>();
    };
    if constexpr (W_CONSTANT) read();
    // The addresses of the pairs of sums that this thread stores.
    const int pair = first_pair(rank, warp), pair_n = tile_n + pair, row = first_row();
    OutType* const pairs = settled(out + (int64_t(matrix) * M + first_m + row) * N + pair_n);
    const int room = settled(N - pair_n);
    const int64_t next_slice = SLICES > 1 ? settled(int64_t(8) * N) : 0;
    const int column = warp * 16 + lane / 4;  // the thread's column of w; it also has column + 8
    // Widens a K tile into registers; `hold` waits for it first.
    using Widened = uint32_t[PIECES][4];
    Widened a[SLOTS];
    auto take = [&](Widened& a, int stage) {
        widen_lines(a, base + stage * W_BYTES, column,
                    [](uint32_t bytes, int, uint32_t& low, uint32_t& high) { widen<XType, FP8>(bytes, low, high); });
    };
    auto hold = [&](int step) {
        barrier_wait(full(step), 0);
        take(a[step % SLOTS], step);
        settle_fragments(a[step % SLOTS]);
    };
#pragma unroll
    for (int step = 0; step < (W_CONSTANT ? HELD : 0); ++step) hold(step);
    wait_for_launches();
    if constexpr (LATE) let_next_begin();
    if (HELD > 0 && warp == 0) {
        if (elect()) {
            for (int step = 0; step < STAGES; ++step) {
                if constexpr (!W_CONSTANT) load_w(step, step);
                load_x(step, step);
            }
        }
        __syncwarp();
    }
    [[maybe_unused]] float2 biases[PAIRS];
    if constexpr (HAS_BIAS) read_biases(biases, bias, int64_t(matrix) * bias_batch, pair_n, room, bias_n);
    if constexpr (!W_CONSTANT) read();

    // Starts the wgmma group of a K tile, and promotes its product: acc += scale * d.
    float acc[SLICES][4] = {};
    using Product = float[ROWS / 2];
    auto multiply = [&](Product& d, Widened& a, int stage) {
        settle_fragments(a);
        const uint32_t from = base + AT_X + stage * X_BYTES;
        const uint64_t low = matrix_descriptor(from), high = matrix_descriptor(from + X_HALF);
        fence_registers(d);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < PIECES; ++i) wgmma(d, a[i], (i < 4 ? low : high) + i % 4 * 2, i > 0);
        wgmma_commit();
        fence_registers(d);
    };
    auto add = [&](Product& d, int step) {
        const float2 scales = scales_of_columns(w_scales, step, warp, column);
        fence_registers(d);
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[s][i] = __fmaf_rn(d[4 * s + i], i < 2 ? scales.x : scales.y, acc[s][i]);
        }
    };
#if HELD
#pragma unroll
    for (int step = 0; step < (W_CONSTANT ? 0 : HELD); ++step) hold(step);
    auto start_product = [&](Product& d, int step) {
        barrier_wait(empty(step), 0);
        multiply(d, a[step % SLOTS], step);
    };
    multiply_stages<ROWS / 2>(start_product, [&](Product& d, int step) {
        add(d, step);
        if (step + HELD < STAGES) hold(step + HELD);
    });
#else
    // Main loop.
    Product d;
    Ring ring, next;
    // Multiplies K tile `step`, which `mine` holds, and widens the next one into `other` meanwhile.
    auto turn = [&](Widened& mine, Widened& other, int step) {
        multiply(d, mine, ring.stage);
        if (step + 1 < count) {
            barrier_wait(full(next.stage), next.parity);
            take(other, next.stage);
            next.advance();
        }
        wgmma_wait<0>();
        add(d, step);
        if (lane == 0) barrier_arrive(empty(ring.stage));
        ring.advance();
    };
    if (count > 0) {
        barrier_wait(full(0), 0);
        take(a[0], 0);
        next.advance();
    }
#pragma unroll 1
    for (int step = 0; step < count; step += 2) {
        turn(a[0], a[1], step);
        if (step + 1 < count) turn(a[1], a[0], step + 1);
    }
#endif

    // Epilogue: reduce over the cluster, scale, add the bias, store pairs of columns.
    auto store = [&](int slice, int i, float2 sums) {
        if (8 * slice + row >= rows) return;
        if constexpr (SCALE == LINE) {
            const float2 scales = *reinterpret_cast<const float2*>(w_scales + pair + 8 * i);
            sums.x *= scales.x, sums.y *= scales.y;
        }
        // Without a bias 0 is added, which makes 0 of -0: mm_a16w8.cu does so too, and serves more rows in the same bits.
        const float2 added = HAS_BIAS ? biases[i] : make_float2(0.0f, 0.0f);
        sums.x += added.x, sums.y += added.y;
        store_pair(pairs + slice * next_slice + 8 * i, sums.x, sums.y, room - 8 * i);
    };
    finish_sums(acc, stages, AT_ARRIVED, base + AT_SENT, rows, rank, warp, store);
}

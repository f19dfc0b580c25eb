// 17 to 128 rows by an FP8 weight on Hopper, K shared by the blocks of a cluster: out (B, M, N) = x (B, M, K) · (w (B, K, N)
// * w_scale) + bias, x of 16 bits.
//
// As in mm_a16w8.cu outᵀ = wᵀ xᵀ is what is computed: a warpgroup widens 64 columns of w from FP8 into registers, 128 of K at
// a time, which are the left operand of wgmma; ROWS of x are the right one. It widens the next stage while the tensor core
// multiplies. Each product is scaled and added in float32. One warp keeps STAGES of 128 of K of both operands full by bulk
// copies. Sums of a cluster's blocks meet by `exchange.cuh`.
//
// The launch begins while the one before it ends, and until then has the weight brought to the L2; of a weight that is
// constant (W_CONSTANT: nothing that may still run writes it or its scales) it fills the stages. The next launch may begin
// at once, or where what it asks for would keep this one waiting (LATE), when the launch before this one has ended.
//
// Macros: INPUT (BF16, FP16; and in the generated `wgmma`, which is of ROWS), FP8 of the enum Fp8, SCALE (LINE, VECTOR, BLOCK
// as in gemv_a16w8.cu), ROWS (a multiple of 16), TILES (1), WARPS_N (4 are a warpgroup), WARPS_K (1), STAGES, CLUSTER,
// RESIDENT, W_CONSTANT, LATE, OUT (BF16, FP16, FP32), BIAS (0, BF16, FP16, FP32).
#include "a16w8.cuh"
#include "exchange.cuh"
#include "ring.cuh"

constexpr int STEP = 128;  // of K in a stage
constexpr int PIECES = STEP / 16;  // of K, that a wgmma multiplies
constexpr int GROUPS = BN / 64;  // of columns, that have one scale for 128 of K if 128 columns do
static_assert(WARPS_N % 4 == 0);

constexpr int W_BYTES = BN * STEP, X_HALF = ROWS * 128, X_BYTES = 2 * X_HALF;  // of a stage; x in two times 64 of K
constexpr int AT_X = STAGES * W_BYTES;
constexpr int AT_ARRIVED = AT_X + STAGES * X_BYTES;
constexpr int AT_FULL = AT_ARRIVED + SUMS_BYTES;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int AT_SENT = AT_EMPTY + STAGES * 8;
constexpr int AT_SCALES = (AT_SENT + 8 + 15) / 16 * 16;

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS + 32, RESIDENT)
splitk_a16w8(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* w_scale,
             const BiasType* bias, OutType* out, int M, int N, int K, int prefetched, int x_batched, int w_batched,
             int s_batch, int s_k, int s_n, int bias_batch, int bias_n) {
    if constexpr (!LATE) let_next_begin();
    char* const stages = swizzled_memory();
    const uint32_t base = shared_address(stages);
    auto full = [&](int stage) { return base + AT_FULL + stage * 8; };
    auto empty = [&](int stage) { return base + AT_EMPTY + stage * 8; };
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so the compiler knows that a warp branches as one
    const int lane = threadIdx.x % 32;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int tile_n = blockIdx.x / CLUSTER * BN, first_m = blockIdx.y * ROWS, matrix = blockIdx.z;
    const int rows = min(M - first_m, ROWS);
    const uint32_t steps = (K + STEP - 1) / STEP;
    const int start = steps * rank / CLUSTER, count = steps * (rank + 1) / CLUSTER - start;
    float* const w_scales = reinterpret_cast<float*>(stages + AT_SCALES);  // (count, BN or GROUPS), (BN) of LINE

    if (threadIdx.x == THREADS) init_barriers(base + AT_FULL, STAGES, bytes_of_sums(rows, rank));
    if constexpr (CLUSTER > 1) cluster_arrive();
    __syncthreads();

    if (warp == WARPS) {
        if (elect()) {
            auto load_w = [&](int stage, int step) {
                barrier_expect(full(stage), W_BYTES + X_BYTES);
                tma_load(base + stage * W_BYTES, w, full(stage), (start + step) * STEP, tile_n, matrix * w_batched);
            };
            auto load_x = [&](int stage, int step) {
#pragma unroll
                for (int half = 0; half < 2; half++)
                    tma_load(base + AT_X + stage * X_BYTES + half * X_HALF, x, full(stage), (start + step) * STEP + half * 64,
                             first_m, matrix * x_batched);
            };
            const int ahead = min(STAGES, count);
            if constexpr (W_CONSTANT) {
                for (int step = 0; step < ahead; step++) load_w(step, step);
            }
            for (int step = W_CONSTANT ? ahead : 0; step < min(prefetched, count); step++)
                tma_prefetch(w, (start + step) * STEP, tile_n, matrix * w_batched);
            wait_for_launches();
            for (int step = 0; step < ahead; step++) {
                if constexpr (!W_CONSTANT) load_w(step, step);
                load_x(step, step);
            }
            Ring ring;
            for (int step = ahead; step < count; step++, ring.advance()) {
                barrier_wait(empty(ring.stage), ring.parity);
                load_w(ring.stage, step);
                load_x(ring.stage, step);
            }
        }
        return;
    }

    auto read = [&] {
        const float* const from = w_scale + int64_t(matrix * w_batched) * s_batch;
        read_scales<BN, THREADS>(w_scales, from, start, count, tile_n, N, s_k, s_n);
    };
    if constexpr (W_CONSTANT) read();
    // Where the thread's pairs of sums go.
    const int pair = first_pair(rank, warp), pair_n = tile_n + pair, row = first_row(), room = N - pair_n;
    OutType* const pairs = out + (int64_t(matrix) * M + first_m + row) * N + pair_n;
    wait_for_launches();
    if constexpr (LATE) let_next_begin();
    if constexpr (!W_CONSTANT) read();
#if BIAS
    float2 biases[PAIRS];
    read_biases(biases, bias, int64_t(matrix) * bias_batch, pair_n, room, bias_n);
#endif
    sync_first<THREADS>();

    const int column = warp * 16 + lane / 4;  // and column + 8
    auto take = [&](uint32_t(&a)[PIECES][4], int stage) {
        widen_lines<FP8>(a, base + stage * W_BYTES, column, [](auto&) {});
    };
    float acc[SLICES][4] = {}, d[ROWS / 2];
    auto multiply = [&](uint32_t(&a)[PIECES][4], int stage) {
        settle_fragments(a);
        const uint32_t from = base + AT_X + stage * X_BYTES;
        const uint64_t low = matrix_descriptor(from), high = matrix_descriptor(from + X_HALF);
        fence_registers(d);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < PIECES; i++) wgmma(d, a[i], (i < 4 ? low : high) + i % 4 * 2, i > 0);
        wgmma_commit();
        fence_registers(d);
    };
    auto add = [&](int step) {
        float left = 1.0f, right = 1.0f;
        if constexpr (SCALE == BLOCK) left = right = w_scales[step * GROUPS + warp / 4];
        if constexpr (SCALE == VECTOR) left = w_scales[step * BN + column], right = w_scales[step * BN + column + 8];
        wgmma_wait<0>();
        fence_registers(d);
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[s][i] = __fmaf_rn(d[4 * s + i], i < 2 ? left : right, acc[s][i]);
        }
    };
    Ring ring, next;
    uint32_t a[2][PIECES][4];
    // Multiplies what `mine` has, the stage of `step`, and takes the next one meanwhile.
    auto turn = [&](uint32_t(&mine)[PIECES][4], uint32_t(&other)[PIECES][4], int step) {
        multiply(mine, ring.stage);
        if (step + 1 < count) {
            barrier_wait(full(next.stage), next.parity);
            take(other, next.stage);
            next.advance();
        }
        add(step);
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

    auto store = [&](int slice, int i, float2 sums) {
        if (8 * slice + row >= rows) return;
        if constexpr (SCALE == LINE) {
            const float2 scales = *reinterpret_cast<const float2*>(w_scales + pair + 8 * i);
            sums.x *= scales.x, sums.y *= scales.y;
        }
#if BIAS
        sums.x += biases[i].x, sums.y += biases[i].y;
#endif
        store_pair(pairs + int64_t(8 * slice) * N + 8 * i, sums.x, sums.y, room - 8 * i);
    };
    finish_sums(acc, stages, AT_ARRIVED, base + AT_SENT, rows, rank, warp, store);
}

// Many rows by an FP8 weight on Hopper: out (B, M, N) = x (B, M, K) · (w (B, K, N) * w_scale) + bias, x of 16 bits.
//
// Computed transposed, outᵀ = wᵀ xᵀ: the left operand of wgmma may come from registers, where wᵀ has just been widened from
// FP8. A block has two warpgroups that multiply, of 64 columns of w each, and one that copies; persistent: each walks over
// output tiles. The copying warpgroup keeps STAGES k-blocks of 128 in flight by TMA. A multiplying warpgroup widens a
// k-block of its columns, 32 registers a thread, and multiplies it by SLICES parts of WIDTH rows of x; where the scale
// changes along K, each into a temporary that is scaled and added, while the other warpgroup has the tensor cores.
//
// Macros: INPUT (BF16, FP16; and in the generated wgmma), FP8 of the enum Fp8, SCALE (LINE, VECTOR, BLOCK as in
// gemv_a16w8.cu), WIDTH, SLICES, STAGES, GROUP, OUT (BF16, FP16), BIAS (0, BF16, FP16, FP32).
#include "groups.cuh"
#include "mma.cuh"

#define GROUPED DENSE
#define CLUSTER 1
#define SPLIT 1
#define SHARE_B 1

#define LINE 1
#define VECTOR 2
#define BLOCK 3

constexpr int MATH = 2;
constexpr int WARPGROUP = 128;
constexpr int BK = 128;
constexpr int BM = WIDTH * SLICES;  // rows of x
constexpr int BN = 64 * MATH;       // columns of w
constexpr int W_BYTES = BN * BK;
constexpr int X_HALF = BM * 64 * 2;  // 64 of K, rows of 128 bytes
constexpr int X_BYTES = 2 * X_HALF;
constexpr int OUT_ROWS = 32;
constexpr int OUT_BYTES = OUT_ROWS * 128;  // of 64 columns
static_assert(WIDTH % OUT_ROWS == 0, "the accumulators of a slice leave as whole parts");
static_assert(BM / OUT_ROWS % 2 == 0, "the buffers of parts take turns over the border of tiles too");

constexpr int AT_X = STAGES * W_BYTES;
constexpr int AT_OUT = AT_X + STAGES * X_BYTES;
constexpr int AT_FULL = AT_OUT + 2 * MATH * OUT_BYTES;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;

#if INPUT == BF16
using XType = Bf16;
#else
using XType = Fp16;
#endif

#include "ring.cuh"
#include "tiles.cuh"

INLINE uint32_t load_shared_pair_of_bytes(uint32_t from) {
    uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from));
    return value;
}

INLINE void store_matrices_turned(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

extern "C" __global__ void __launch_bounds__((MATH + 1) * WARPGROUP, 1)
mm_a16w8(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* w_scale,
         const BiasType* bias, const __grid_constant__ TensorMap out, const Problem problem, int x_batched, int w_batched, int s_batch,
         int s_k, int s_n, int bias_batch, int bias_n) {
    extern __shared__ __align__(1024) char memory_[];
    const uint32_t base = shared_address(memory_);
    let_next_begin();
    auto full = [&](int stage) { return base + AT_FULL + stage * 8; };
    auto empty = [&](int stage) { return base + AT_EMPTY + stage * 8; };

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    const int lane = lane_index();

    if (threadIdx.x == 0) {
        prefetch_map(x);
        prefetch_map(w);
        prefetch_map(out);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), MATH * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_launches();

    const Walk walk(problem, nullptr);
    Ring ring;
    if (warpgroup == MATH) {
        give_registers<40>();
        if (warp == 0 && elect()) {
            for (int index = blockIdx.x; index < problem.tiles(); index += gridDim.x) {
                const Tile tile = walk.at(index);
                const int x_batch = tile.batch * x_batched, w_batch = tile.batch * w_batched;
#pragma unroll 1  // this warpgroup has few registers
                for (int k = tile.k_start; k < tile.k_stop; k++, ring.advance()) {
                    const int s = ring.stage;
                    const uint32_t to_x = base + AT_X + s * X_BYTES;
                    barrier_wait(empty(s), ring.parity ^ 1);
                    barrier_expect(full(s), W_BYTES + X_BYTES);
                    tma_load(base + s * W_BYTES, w, full(s), k * BK, tile.n, w_batch);
                    tma_load(to_x, x, full(s), k * BK, tile.m, x_batch);
                    tma_load(to_x + X_HALF, x, full(s), k * BK + 64, tile.m, x_batch);
                }
            }
        }
    } else {
        take_registers<232>();
        const int line = warpgroup * 64 + warp * 16 + lane / 4;  // column of w in the tile; also line + 8
        for (int index = blockIdx.x; index < problem.tiles(); index += gridDim.x) {
            const Tile tile = walk.at(index);
            const int n0 = tile.n + line, n1 = n0 + 8;
            const float* scales = w_scale + int64_t(tile.batch * w_batched) * s_batch;
            float acc[SLICES][WIDTH / 2] = {};

            // Of a k-block: read while the one before is multiplied.
            float next0 = 1.0f, next1 = 1.0f;
            auto read_scales = [&](int k) {
                if constexpr (SCALE == BLOCK) {
                    next0 = next1 = k < tile.k_stop ? __ldg(scales + int64_t(tile.n / 128) * s_n + int64_t(k) * s_k) : 0.0f;
                } else if constexpr (SCALE == VECTOR) {
                    next0 = k < tile.k_stop && n0 < problem.N ? __ldg(scales + int64_t(n0) * s_n + int64_t(k) * s_k) : 0.0f;
                    next1 = k < tile.k_stop && n1 < problem.N ? __ldg(scales + int64_t(n1) * s_n + int64_t(k) * s_k) : 0.0f;
                }
            };
            read_scales(tile.k_start);
            for (int k = tile.k_start; k < tile.k_stop; k++, ring.advance()) {
                const int s = ring.stage;
                const float scale0 = next0, scale1 = next1;
                barrier_wait(full(s), ring.parity);
                read_scales(k + 1);
                // A thread has elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16, which are one piece of a line; pieces
                // of a line are exchanged by the swizzle.
                uint32_t a[BK / 16][4];
#pragma unroll
                for (int piece = 0; piece < BK / 16; piece++) {
                    const uint32_t at = base + s * W_BYTES + line * 128 + ((piece ^ (line % 8)) * 16) + lane % 4 * 2;
                    widen<XType, FP8>(load_shared_pair_of_bytes(at) | load_shared_pair_of_bytes(at + 8) << 16, a[piece][0],
                                      a[piece][2]);
                    widen<XType, FP8>(load_shared_pair_of_bytes(at + 1024) | load_shared_pair_of_bytes(at + 1032) << 16,
                                      a[piece][1], a[piece][3]);
                }
#pragma unroll
                for (int piece = 0; piece < BK / 16; piece++) {  // all widened before the first product reads them
#pragma unroll
                    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[piece][i])::"memory");
                }
                auto start = [&](float(&d)[WIDTH / 2], int slice, bool onto) {
                    const uint32_t from = base + AT_X + s * X_BYTES + slice * WIDTH * 128;
                    const uint64_t low = matrix_descriptor(from), high = matrix_descriptor(from + X_HALF);
                    fence_registers(d);
                    wgmma_fence();
#pragma unroll
                    for (int step = 0; step < BK / 16; step++)
                        wgmma(d, a[step], (step < 4 ? low : high) + step % 4 * 2, onto || step > 0);
                    wgmma_commit();
                    fence_registers(d);
                };
                if constexpr (SCALE == LINE) {
#pragma unroll
                    for (int slice = 0; slice < SLICES; slice++) start(acc[slice], slice, k > tile.k_start);
                    wgmma_wait<0>();
#pragma unroll
                    for (int slice = 0; slice < SLICES; slice++) fence_registers(acc[slice]);
                    if (lane == 0) barrier_arrive(empty(s));
                } else {
#pragma unroll
                    for (int slice = 0; slice < SLICES; slice++) {
                        float d[WIDTH / 2];
                        start(d, slice, false);
                        wgmma_wait<0>();
                        fence_registers(d);
                        if (slice == SLICES - 1 && lane == 0) barrier_arrive(empty(s));
#pragma unroll
                        for (int j = 0; j < WIDTH / 8; j++) {
                            acc[slice][4 * j + 0] += scale0 * d[4 * j + 0];
                            acc[slice][4 * j + 1] += scale0 * d[4 * j + 1];
                            acc[slice][4 * j + 2] += scale1 * d[4 * j + 2];
                            acc[slice][4 * j + 3] += scale1 * d[4 * j + 3];
                        }
                    }
                }
            }

            float last0 = 1.0f, last1 = 1.0f, bias0 = 0.0f, bias1 = 0.0f;
            if constexpr (SCALE == LINE) {
                last0 = n0 < problem.N ? __ldg(scales + int64_t(n0) * s_n) : 0.0f;
                last1 = n1 < problem.N ? __ldg(scales + int64_t(n1) * s_n) : 0.0f;
            }
#if BIAS
            const BiasType* biases = bias + int64_t(tile.batch) * bias_batch;
            bias0 = n0 < problem.N ? float(biases[int64_t(n0) * bias_n]) : 0.0f;
            bias1 = n1 < problem.N ? float(biases[int64_t(n1) * bias_n]) : 0.0f;
#endif
            // Parts of OUT_ROWS rows leave through two buffers in turn: rows of 64 columns, turned around on the way.
#pragma unroll
            for (int part = 0; part < BM / OUT_ROWS; part++) {
                const uint32_t buffer = base + AT_OUT + (warpgroup * 2 + part % 2) * OUT_BYTES;
                if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<1>();
                warpgroup_sync(1 + warpgroup);
                const float(&sum)[WIDTH / 2] = acc[part * OUT_ROWS / WIDTH];
#pragma unroll
                for (int j = 0; j < OUT_ROWS / 8; j += 2) {
                    uint32_t packed[4];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float* v = sum + (part * OUT_ROWS % WIDTH / 8 + j + i) * 4;
                        packed[2 * i] = pack<OutType>(v[0] * last0 + bias0, v[1] * last0 + bias0);
                        packed[2 * i + 1] = pack<OutType>(v[2] * last1 + bias1, v[3] * last1 + bias1);
                    }
                    const int matrix = lane / 8, row = 8 * (j + matrix / 2) + lane % 8;
                    const int piece = (warp * 2 + matrix % 2) ^ (row % 8);
                    store_matrices_turned(buffer + row * 128 + piece * 16, packed[0], packed[1], packed[2], packed[3]);
                }
                fence_async();
                warpgroup_sync(1 + warpgroup);
                if (threadIdx.x % WARPGROUP == 0) {
                    tma_store(out, buffer, tile.n + warpgroup * 64, tile.m + part * OUT_ROWS, tile.batch);
                    tma_store_commit();
                }
            }
        }
        if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<0>();
    }
}

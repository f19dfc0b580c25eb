// The largest magnitude of x (B, M, N): for each matrix one maximum a block of threads, in float32.
//
// Decomposition. The blocks of a matrix walk over its tiles of TILE_M x 128, each block from its own number on. A thread
// loads 8 columns of ROWS consecutive rows of a tile, as in quantize.cu, and keeps one maximum.
//
// A maximum is taken of the bits of magnitudes, which as integers order as the magnitudes do, NaN last. A second launch
// over the maxima of the blocks leaves one for each matrix.
//
// Macros: INPUT, EVEN, PARTIAL, ALIGNED, WARPS, ROWS, BLOCKS and LOAD as in quantize.cu.
#define SOURCE Source::PLAIN
#include "values.cuh"

constexpr int TILE_N = 128;
constexpr int TILE_M = 2 * WARPS * ROWS;
constexpr int THREADS = 32 * WARPS;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) amax(const void* x, float* amax, int M, int N, int x_m) {
    __shared__ uint32_t of_warps[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_row = int64_t(blockIdx.z) * M;
    const int tiles_n = (N + TILE_N - 1) / TILE_N, tiles = (M + TILE_M - 1) / TILE_M * tiles_n;
    uint32_t largest = 0;

    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int tile_m = tile / tiles_n * TILE_M, tile_n = tile % tiles_n * TILE_N;
        const int row = tile_m + ROWS * (2 * warp + lane / 16), column = tile_n + 8 * (lane % 16);
        if (EVEN || (tile_m + TILE_M <= M && tile_n + TILE_N <= N)) {
            largest = max(largest, load_values<true>(x, nullptr, nullptr, first_row, row, column, M, N, x_m, 0).amax());
        } else {
            largest =
                max(largest, load_values<false>(x, nullptr, nullptr, first_row, row, column, M, N, x_m, 0).amax());
        }
    }

    // Epilogue: reduce over the lanes of a warp, then over the warps.
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) of_warps[warp] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = max(largest, of_warps[w]);
        amax[int64_t(blockIdx.z) * gridDim.x + blockIdx.x] = __uint_as_float(largest);
    }
}

// 1 / sqrt(mean(x²) + eps) of each row of x (M, N), whose rows are x_m elements apart; one block a row.
//
// Macros: INPUT, PARTIAL and ALIGNED as in quantize.cu, and the others that values.cuh needs.
#include "row_sum.cuh"
#include "values.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    row_rstd(const void* x, float* rstd, int M, int N, int x_m, float eps) {
    __shared__ float sums[WARPS];
    const int row = blockIdx.x;
    float partial[8] = {};
#pragma unroll 4
    for (int column = 8 * threadIdx.x; column < N; column += PASS) {
        Octet octet[1];
        load_octets<Load::CACHED>(octet, x, 0, row, column, M, N, x_m);
#pragma unroll
        for (int c = 0; c < 8; ++c) partial[c] = plus_square(partial[c], octet[0].at(c));
    }
    const float sum = sum_of_warp(add_neighbours(partial));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) rstd[row] = rstd_of(sums, N, eps);
}

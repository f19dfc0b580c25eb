// 1 / sqrt(mean(x²) + eps) of a row, bit for bit as in fp8fn.ops.reference.produce, by a block of 256 threads.
//
// The squares are summed in a fixed order: 2048 partial sums, the i-th of columns i, i + 2048, ...; then neighbours are
// added until one sum is left. Thread t has partial sums 8 t to 8 t + 7.
#pragma once
#include "types.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int PASS = 8 * THREADS;  // columns that the block covers at a time

INLINE float add_neighbours(const float (&v)[8]) {
    return __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[1]), __fadd_rn(v[2], v[3])),
                     __fadd_rn(__fadd_rn(v[4], v[5]), __fadd_rn(v[6], v[7])));
}

INLINE float sum_of_warp(float sum) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, lanes));
    return sum;
}

INLINE float rstd_of(const float (&sums)[WARPS], int N, float eps) {
    const float mean = __fdiv_rn(add_neighbours(sums), float(N));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

INLINE float plus_square(float sum, float x) { return __fadd_rn(sum, __fmul_rn(x, x)); }

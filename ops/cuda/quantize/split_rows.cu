// Splits 16-bit rows x (M, K) into sums of PARTS FP8 matrices, with one scale for each 128 columns of a row, so that an
// FP8 tensor core multiplies what they were: `scaled_mm.cu` adds the products of all parts.
//
// Decomposition. A lane has 8 columns of a row, and 16 lanes the columns of one scale. Before it waits for the launches
// before it, the kernel does nothing; afterwards the next may begin, for all before this one have ended.
//
// Macros: INPUT (BF16 or FP16) of the enum Element; PARTS; THREADS.
#include "element.cuh"
#include "overlap.cuh"
#include "split.cuh"
#include "types.cuh"

using XType = TypeOf<INPUT>::type;

// K is a multiple of 8. `data` is (PARTS, rows, K) with `data_m` from a row to the next, and has M rows or more; `scale` is
// (K / 128, M) in lines of `scale_k`.
extern "C" __global__ void __launch_bounds__(THREADS)
    split_rows(const uint16_t* x, uint8_t* data, float* scale, int K, int x_m, int rows, int data_m, int scale_k) {
    wait_for_launches();
    let_next_begin();
    const int column = (blockIdx.y * THREADS + threadIdx.x) * 8, row = blockIdx.x;
    const uint4 octet = load_written(x + int64_t(row) * x_m + column, column < K);
    const uint32_t words[4] = {octet.x, octet.y, octet.z, octet.w};

    // The largest magnitude of 16 lanes, as its bits.
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) largest = __vmaxu2(largest, words[w] & 0x7fff7fffu);
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, lanes));
    const PartsScale found = scale_of_parts<XType>(int(max(largest >> 16, largest & 0xffffu)));
    if (column >= K) return;
    if (column % 128 == 0) scale[int64_t(column / 128) * scale_k + row] = __uint_as_float(found.bits);

    uint32_t first[PARTS], second[PARTS];
    split<XType, PARTS, false>(words[0], words[1], found, first);
    split<XType, PARTS, false>(words[2], words[3], found, second);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        store8<Store::NORMAL>(data + (int64_t(part) * rows + row) * data_m + column,
                              make_uint2(first[part], second[part]));
}

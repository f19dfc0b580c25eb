// Normalizes rows by their root mean square, multiplies by the weight and quantizes, in blocks of 1 x 128 or with one
// scale for a row. The rows, of up to 16384 columns, are those of x, or of x + residual, rounded to the type of x, which
// are stored too. They are read once and held in registers as loaded.
//
// Decomposition. A block of 256 threads has ROWS rows, and covers 2048 columns in each of PASSES passes.
//
// Macros: those of values.cuh; FP8, FORMAT, BLOCKS and STORE as in quantize.cu; ROWS, rows of a block; PASSES; WHOLE, a
// row has one scale; ADD, the rows are x + residual.
#include "convert.cuh"
#include "fp8_block.cuh"
#include "row_sum.cuh"
#include "row_scatter.cuh"
#include "values.cuh"

constexpr int ITEMS = 8;  // octets of a thread
static_assert(ROWS * PASSES <= ITEMS, "a thread holds up to 8 octets");
static_assert(ALIGNED && !PARTIAL, "octets are whole");

using Scale = BlockScale<FORMAT>;
using Stored = StoredScale<FORMAT>::type;

// 16 neighbouring lanes share a block of 128 columns.
__device__ constexpr int BLOCK_LANES[4] = {1, 2, 4, 8};

// Adds two octets, and rounds the sums to their type.
template <typename T>
INLINE void add(Octet& to, const Octet& other) {
#pragma unroll
    for (int w = 0; w < OCTET_WORDS; ++w) {
        if constexpr (SIXTEEN_BITS) {
            to.word[w] =
                pack<T>(__fadd_rn(to.at(2 * w), other.at(2 * w)), __fadd_rn(to.at(2 * w + 1), other.at(2 * w + 1)));
        } else {
            to.word[w] = __float_as_uint(__fadd_rn(to.at(w), other.at(w)));
        }
    }
}

INLINE void store(void* base, int64_t index, const Octet& octet) {
    char* address = static_cast<char*>(base) + index * ELEMENT_BYTES;
#pragma unroll
    for (int w = 0; w < OCTET_WORDS; w += 4) {
        const uint32_t* word = octet.word + w;
        store16<Store::NORMAL>(address + 4 * w, make_uint4(word[0], word[1], word[2], word[3]));
    }
}

// x has M rows, matrices of `matrix_m` rows that follow each other. Data has strides (row_m, 1) throughout; the scales
// of a matrix, (matrix_m, ceil(N / 128)), have strides (1, row_scale_lead). With one scale for a row, those of a matrix
// follow each other, and the next matrix's are row_scale_lead further.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantize_rms_norm(const void* x, const void* residual, const void* weight, void* sum, uint8_t* row_data,
                      Stored* row_scale, int M, int N, int matrix_m, int x_m, int residual_m, int sum_m, int row_m,
                      int row_scale_lead, float eps) {
    __shared__ float sums[ROWS][WARPS];
    __shared__ uint32_t maxima[ROWS][WARPS];
    __shared__ float rstd[ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = blockIdx.x * ROWS, first_column = 8 * threadIdx.x;

    // Load, add, and reduce the sum of squares.
    Octet octets[PASSES][ROWS];
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        load_octets<LOAD>(octets[p], x, 0, first_row, p * PASS + first_column, M, N, x_m);
    }
    if constexpr (ADD) {
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int column = p * PASS + first_column;
            Octet others[ROWS];
            load_octets<LOAD>(others, residual, 0, first_row, column, M, N, residual_m);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                add<TypeOf<INPUT>::type>(octets[p][r], others[r]);
                if (EVEN || (first_row + r < M && column < N)) {
                    store(sum, int64_t(first_row + r) * sum_m + column, octets[p][r]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float partial[8] = {};
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
#pragma unroll
            for (int c = 0; c < 8; ++c) partial[c] = plus_square(partial[c], octets[p][r].at(c));
            octets[p][r].pack_again();
        }
        const float sum = sum_of_warp(add_neighbours(partial));
        if (lane == 0) sums[r][warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x < ROWS) rstd[threadIdx.x] = rstd_of(sums[threadIdx.x], N, eps);
    __syncthreads();

    // The normalized values are computed twice, for the maxima and for the bytes: to keep them takes twice the
    // registers. Past the last column are zeros, whose product with an Inf would be a NaN.
    const auto normalised = [&](int p, int r, int c, const Octet& by) {
        return EVEN || p * PASS + first_column < N ? octets[p][r].at(c) * rstd[r] * by.at(c) : 0.0f;
    };
    uint32_t amax[ITEMS] = {};
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        Octet by[1];
        load_octets<Load::CACHED>(by, weight, 0, 0, p * PASS + first_column, 1, N, 0);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                uint32_t& largest = amax[WHOLE ? r : p * ROWS + r];
                largest = max(largest, FloatValues::magnitude(normalised(p, r, c, by[0])));
            }
            octets[p][r].pack_again();
        }
    }
    // Find the scales.
    const auto keep = [&](const Scale& scale, int row, int64_t block_n, int64_t blocks_n) {
        row_scale[(row / matrix_m * blocks_n + block_n) * row_scale_lead + row % matrix_m] = scale.stored;
    };
    [[maybe_unused]] Scale of_item;
    [[maybe_unused]] float of_row[ROWS];
    if constexpr (WHOLE) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t largest = __reduce_max_sync(~0u, amax[r]);
            if (lane == 0) maxima[r][warp] = largest;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            uint32_t largest = maxima[r][0];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) largest = max(largest, maxima[r][w]);
            const Scale scale = block_scale<FP8, FORMAT>(largest);
            of_row[r] = scale.inverse;
            if (threadIdx.x == r && first_row + r < M) keep(scale, first_row + r, 0, 1);
        }
    } else {
        int item;
        of_item = block_scale<FP8, FORMAT>(scatter_max(amax, BLOCK_LANES, lane, item));
        const int row = first_row + item % ROWS, block_n = (item / ROWS * PASS + first_column) / 128;
        if (leads_item<ITEMS>(lane, BLOCK_LANES) && item < ROWS * PASSES && row < M && 128 * block_n < N) {
            keep(of_item, row, block_n, (N + 127) / 128);
        }
    }
    const auto inverse_of = [&](int p, int r) {
        if constexpr (WHOLE) {
            return of_row[r];
        } else {
            return __shfl_sync(~0u, of_item.inverse, (lane & 16) | lane_of_item<ITEMS>(p * ROWS + r, BLOCK_LANES));
        }
    };
    // Quantize and store.
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        const int column = p * PASS + first_column;
        Octet by[1];
        load_octets<Load::CACHED>(by, weight, 0, 0, column, 1, N, 0);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float inverse = inverse_of(p, r);
            float v[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) v[c] = normalised(p, r, c, by[0]) * inverse;
            const uint2 piece = make_uint2(pack<FP8>(v[0], v[1], v[2], v[3]), pack<FP8>(v[4], v[5], v[6], v[7]));
            if (EVEN || (first_row + r < M && column < N)) {
                store8<STORE>(row_data + int64_t(first_row + r) * row_m + column, piece);
            }
        }
    }
}

// From gate and up `(B, M, N)` in FP8, in blocks of 1 x 128, and the gradient of h = silu(gate) * up in 16 bits,
// computes the gradients of gate and up, and h again, and quantizes all three in one launch: each gradient in blocks of
// 1 x 128 into a row-major matrix and in blocks of 128 x 1 into a column-major one, h in blocks of 128 x 1 or 128 x 128
// into a column-major matrix.
//
// Decomposition. A block of threads has a tile of 128 x 128, of which it reads 64 KiB and writes 80. A thread holds 8
// columns of 8 consecutive rows: 64 registers of inputs, in whose place come those of the two gradients, rounded to the
// incoming gradient's type as autograd rounds them. So maxima are taken of two values at a time. h is parked in shared
// memory, so that two blocks fit a multiprocessor without spills.
//
// Phases.
//   Loads: of the tile into registers, of the row scales of gate and up into shared memory.
//   Results: computed in float32, two columns at a time.
//   Maxima: of columns to shared memory; of rows by shuffles, after which rows are stored.
//   Columns: 192 threads make the scales of two columns each; all transpose through shared memory and store lines.
//
// Macros: INPUT, of 16 bits; KEPT, the type of gate and up; FP8 of the gradients and PRODUCT_FP8 of h, FORMAT of all
// scales that are written; PRODUCT_SQUARE, h has blocks of 128 x 128; EVEN, WARPS, ROWS, BLOCKS, LOAD, STORE and
// ROW_BYTES as in quantize.cu. N is a multiple of 8, rows of the gradient begin at multiples of 16 bytes and those of
// gate and up at multiples of 8: PARTIAL is 0 and ALIGNED 1.
#include "gated_tile.cuh"
#include "mma.cuh"

using Stored = StoredScale<FORMAT>::type;
using Wide = TypeOf<INPUT>::type;

static_assert(TILE_M == 128 && ROWS == 8 && THREADS == 2 * TILE_M);

constexpr int OF_GATE = 0, OF_UP = 1, PRODUCT = 2;
constexpr int RESULTS = 3;

struct Shared {
    Turned turned[RESULTS];
    uint4 parked[ROWS][THREADS];  // h: each thread reads back its own
    uint32_t amax[RESULTS][WARPS][TILE_N / 2];  // of two columns
    float inverse[RESULTS][TILE_N];
    float scales[2][TILE_M];  // of the rows of gate and up
};

struct In {
    const void* grad;
    const uint8_t *gate, *up;
    const float *gate_scale, *up_scale;
    int M, N, grad_m, gate_m, up_m, gate_lead, up_lead;
};
// The gradients of gate and of up by rows; by columns, h as well.
struct Out {
    uint8_t* row_data[2];
    Stored* row_scale[2];
    uint8_t* col_data[RESULTS];
    Stored* col_scale[RESULTS];
    int row_m, row_lead, col_n, col_lead, product_lead;
};

// The matrix of the batch. Each phase asks anew: addresses that were made of it would take registers meanwhile.
INLINE int64_t matrix() {
    uint32_t batch = blockIdx.z;
    forget(batch);
    return batch;
}
INLINE int blocks(int size) { return (size + 127) / 128; }

// Loads 8 bytes of COUNT rows from `at.row + from` on; zeros outside of the matrix.
template <bool WHOLE, int COUNT>
INLINE void load_bytes(uint2 (&bytes)[COUNT], const uint8_t* base, int stride, const In& in, Place at, int from) {
    const uint8_t* const first = base + (matrix() * in.M + at.row + from) * stride + at.column;
    const int inside = WHOLE ? COUNT : at.column < in.N ? in.M - at.row - from : 0;
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
        bytes[r] = make_uint2(0, 0);
        if (r < inside) bytes[r] = load8(first + int64_t(r) * stride);
    }
}

// Loads the scales of the tile's rows, of gate by one half of the threads and of up by the other.
template <bool WHOLE>
INLINE void load_scales(Shared& shared, const In& in) {
    const bool of_up = threadIdx.x >= TILE_M;
    const int row = blockIdx.y * TILE_M + threadIdx.x % TILE_M;
    const float* const scales = of_up ? in.up_scale : in.gate_scale;
    const int64_t first = (matrix() * blocks(in.N) + blockIdx.x) * (of_up ? in.up_lead : in.gate_lead);
    shared.scales[of_up][threadIdx.x % TILE_M] = WHOLE || row < in.M ? __ldg(scales + first + row) : 0.0f;
}

// The results of two columns of a row, packed: gate and up as pairs of float16, `grads` as in memory.
INLINE void compute(uint32_t (&results)[RESULTS], uint32_t gates, uint32_t ups, float gate_scale, float up_scale,
                    uint32_t grads) {
    float values[RESULTS][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float gate = half_to_float(uint16_t(gates >> 16 * c)) * gate_scale;
        const float up = half_to_float(uint16_t(ups >> 16 * c)) * up_scale;
        const float grad = Octet::to_float(grads, c);
        const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-gate));
        const float gated = gate * sigmoid;
        values[OF_GATE][c] = grad * (up * sigmoid * (1.0f + gate * (1.0f - sigmoid)));
        values[OF_UP][c] = grad * gated;
        values[PRODUCT][c] = gated * up;
    }
#pragma unroll
    for (int which = 0; which < RESULTS; ++which) {
        results[which] = pack<Wide>(values[which][0], values[which][1]);
        forget(results[which]);
    }
}

// Transposes a result, each column scaled by its inverse scale.
template <Fp8 TYPE>
INLINE void turn_by(const PackedValues& values, Shared& shared, int which, Place at) {
    float inverse[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) inverse[c] = shared.inverse[which][8 * at.octet + c];
    turn<TYPE>(values, inverse, shared.turned[which], at);
}

// Leaves the largest magnitudes of a warp's columns in shared memory.
INLINE void exchange_maxima(uint32_t (&amax)[4], Shared& shared, int which, Place at) {
#pragma unroll
    for (int w = 0; w < 4; ++w) amax[w] = __vmaxu2(amax[w], __shfl_xor_sync(~0u, amax[w], OTHER_ROWS));
    if (!(threadIdx.x & OTHER_ROWS)) {
        *reinterpret_cast<uint4*>(&shared.amax[which][threadIdx.x / 32][4 * at.octet]) =
            make_uint4(amax[0], amax[1], amax[2], amax[3]);
    }
}

// The scales of the columns, of two of a result in each thread; one scale for all columns of h in squares.
template <bool WHOLE>
INLINE void make_column_scales(const In& in, const Out& out, Shared& shared) {
    constexpr int PAIRS = TILE_N / 2;
    if (threadIdx.x >= RESULTS * PAIRS) return;
    const int which = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS;
    const int block_m = blockIdx.y, block_n = blockIdx.x, column = block_n * TILE_N + 2 * pair;
    uint32_t largest = 0;
    if (PRODUCT_SQUARE && which == PRODUCT) {
        // Each of the two warps looks at all columns.
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            largest = __vmaxu2(largest, __vmaxu2(shared.amax[PRODUCT][w][pair], shared.amax[PRODUCT][w][pair ^ 32]));
        }
        largest = __reduce_max_sync(~0u, max(largest >> 16, largest & 0xffffu));
        const auto scale = block_scale<PRODUCT_FP8, FORMAT>(PackedValues::widened(largest, false));
        shared.inverse[PRODUCT][2 * pair] = shared.inverse[PRODUCT][2 * pair + 1] = scale.inverse;
        const int64_t line = matrix() * blocks(in.N) + block_n;
        if (pair == 0) out.col_scale[PRODUCT][line * out.product_lead + block_m] = scale.stored;
        return;
    }
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = __vmaxu2(largest, shared.amax[which][w][pair]);
    Stored* scales = which == PRODUCT ? out.col_scale[PRODUCT]
                     : which == OF_UP ? out.col_scale[OF_UP]
                                      : out.col_scale[OF_GATE];
    scales += (matrix() * blocks(in.M) + block_m) * (which == PRODUCT ? out.product_lead : out.col_lead) + column;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const uint32_t bits = PackedValues::widened(largest, c);
        const auto scale = PRODUCT_FP8 != FP8 && which == PRODUCT ? block_scale<PRODUCT_FP8, FORMAT>(bits)
                                                                  : block_scale<FP8, FORMAT>(bits);
        shared.inverse[which][2 * pair + c] = scale.inverse;
        if (WHOLE || column + c < in.N) scales[c] = scale.stored;
    }
}

template <bool WHOLE>
INLINE void backward_tile(const In& in, const Out& out, Place at, Shared& shared) {
    // Loads and results. A tile at an edge, whose checks take registers, is loaded in two parts.
    constexpr int PART = WHOLE ? ROWS : ROWS / 2;
    PackedValues of_gate, of_up;
    uint32_t amax[4] = {};  // of the columns of h
#pragma unroll
    for (int from = 0; from < ROWS; from += PART) {
        Octet grads[PART];
        uint2 gate[PART], up[PART];
        load_bytes<WHOLE>(gate, in.gate, in.gate_m, in, at, from);
        load_bytes<WHOLE>(up, in.up, in.up_m, in, at, from);
        load_octets<LOAD, WHOLE>(grads, in.grad, matrix() * in.M, at.row + from, at.column, in.M, in.N, in.grad_m);
        if (from == 0) {
            load_scales<WHOLE>(shared, in);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < PART; ++i) {
            const int r = from + i, row = ROWS * at.group + r;
            const float gate_scale = shared.scales[0][row], up_scale = shared.scales[1][row];
            uint32_t gates[4], ups[4], product[4];
            to_halves<KEPT>(gate[i].x, gates[0], gates[1]);
            to_halves<KEPT>(gate[i].y, gates[2], gates[3]);
            to_halves<KEPT>(up[i].x, ups[0], ups[1]);
            to_halves<KEPT>(up[i].y, ups[2], ups[3]);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t results[RESULTS];
                compute(results, gates[w], ups[w], gate_scale, up_scale, grads[i].word[w]);
                amax[w] = __vmaxu2(amax[w], results[PRODUCT] & MAGNITUDES);
                of_gate.row[r].word[w] = results[OF_GATE];
                of_up.row[r].word[w] = results[OF_UP];
                product[w] = results[PRODUCT];
            }
            shared.parked[r][threadIdx.x] = make_uint4(product[0], product[1], product[2], product[3]);
        }
    }

    // Maxima.
    exchange_maxima(amax, shared, PRODUCT, at);
#pragma unroll
    for (int w = 0; w < 4; ++w) amax[w] = of_gate.column_words(w);
    of_gate.pack_again();
    exchange_maxima(amax, shared, OF_GATE, at);
#pragma unroll
    for (int w = 0; w < 4; ++w) amax[w] = of_up.column_words(w);
    of_up.pack_again();
    exchange_maxima(amax, shared, OF_UP, at);
    {
        const int64_t batch = matrix(), rows = batch * in.M * out.row_m;
        uint8_t* const data[2] = {out.row_data[OF_GATE] + rows, out.row_data[OF_UP] + rows};
        const int64_t scales = (batch * blocks(in.N) + blockIdx.x) * out.row_lead;
        store_pair_of_rows<WHOLE, FP8, FORMAT>(of_gate, of_up, data, out.row_scale, out.row_m, scales, at, in.M, in.N);
    }
    __syncthreads();

    // Columns.
    make_column_scales<WHOLE>(in, out, shared);
    __syncthreads();
    turn_by<FP8>(of_gate, shared, OF_GATE, at);
    turn_by<FP8>(of_up, shared, OF_UP, at);
    PackedValues product;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const uint4 words = shared.parked[r][threadIdx.x];
        product.row[r] = {words.x, words.y, words.z, words.w};
    }
    turn_by<PRODUCT_FP8>(product, shared, PRODUCT, at);
    __syncthreads();
    const int64_t columns = matrix() * in.N * out.col_n;
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
        store_turned<WHOLE, false>(shared.turned[i], out.col_data[i] + columns, out.col_n, blockIdx.y * TILE_M,
                                   blockIdx.x * TILE_N, in.M, in.N, TILE_M);
    }
}

// Row-major data has strides (row_m, 1), column-major data (1, col_n). Scales of rows have strides (1, row_lead), those
// of columns (col_lead, 1), those of h (product_lead, 1) or, of squares, (1, product_lead). Matrices of a batch follow
// each other.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    silu_mul_backward(const void* grad, const uint8_t* gate, const float* gate_scale, const uint8_t* up,
                      const float* up_scale, uint8_t* grad_gate, Stored* grad_gate_scale, uint8_t* grad_gate_columns,
                      Stored* grad_gate_columns_scale, uint8_t* grad_up, Stored* grad_up_scale,
                      uint8_t* grad_up_columns, Stored* grad_up_columns_scale, uint8_t* product, Stored* product_scale,
                      int M, int N, int grad_m, int gate_m, int up_m, int gate_lead, int up_lead, int row_m,
                      int row_lead, int col_n, int col_lead, int product_lead) {
    DYNAMIC_SHARED(Shared, shared);
    const int lane = threadIdx.x % 32;
    Place at;
    at.octet = (lane & 7) | (lane & 16) >> 1;
    at.group = 2 * (threadIdx.x / 32) + (lane & OTHER_ROWS) / OTHER_ROWS;
    at.row = blockIdx.y * TILE_M + ROWS * at.group;
    at.column = blockIdx.x * TILE_N + 8 * at.octet;

    const In in{grad, gate, up, gate_scale, up_scale, M, N, grad_m, gate_m, up_m, gate_lead, up_lead};
    const Out out{
        {grad_gate, grad_up},
        {grad_gate_scale, grad_up_scale},
        {grad_gate_columns, grad_up_columns, product},
        {grad_gate_columns_scale, grad_up_columns_scale, product_scale},
        row_m,
        row_lead,
        col_n,
        col_lead,
        product_lead,
    };
    const bool whole = (int(blockIdx.y) + 1) * TILE_M <= M && int(blockIdx.x) < N / TILE_N;
    if (EVEN || whole) {
        backward_tile<true>(in, out, at, shared);
    } else {
        backward_tile<false>(in, out, at, shared);
    }
}

// From gate and up `(B, M, N)`, in 16 bits or in FP8 in blocks of 1 x 128, and the gradient of h = silu(gate) * up in
// 16 bits, computes the gradients of gate and up, and h again, and quantizes all three in one launch: each gradient in
// blocks of 1 x 128 into a row-major matrix and in blocks of 128 x 1 into a column-major one, h in blocks of 128 x 1 or
// 128 x 128 into a column-major matrix.
//
// Decomposition. A block of threads has a tile of 128 x 128, of which it reads 64 KiB (96 of 16 bits) and writes 80. A
// thread holds 8 columns of 8 consecutive rows: 64 registers of inputs, in whose place come those of the two gradients,
// rounded to the incoming gradient's type as autograd rounds them. So maxima are taken of two values at a time. 16-bit
// inputs take 96 registers and are loaded in two parts of 4 rows. h is parked in shared memory, so that two blocks fit a
// multiprocessor without spills. From FP8 inputs, h is rounded as the gradients are. From 16-bit inputs h is parked in
// float32, since its results have the bits of `quantize_silu_mul`, which a forward that keeps h in FP8 would save.
//
// Phases.
//   Loads: of the tile into registers, of the row scales of FP8 inputs into shared memory.
//   Results: computed in float32, two columns at a time.
//   Maxima: of columns to shared memory; of rows by shuffles, after which rows are stored.
//   Columns: 192 threads make the scales of two columns each; all transpose through shared memory and store lines.
//
// Macros: INPUT, of 16 bits; KEPT, the type of gate and up: an Fp8 or INPUT; FP8 of the gradients and PRODUCT_FP8 of h, FORMAT of all
// scales that are written; PRODUCT_SQUARE, h has blocks of 128 x 128; EVEN, WARPS, ROWS, BLOCKS, LOAD, STORE and
// ROW_BYTES as in quantize.cu. N is a multiple of 8, rows of 16-bit inputs begin at multiples of 16 bytes and those of
// FP8 inputs at multiples of 8: PARTIAL is 0 and ALIGNED 1.
#include "gated_tile.cuh"
#include "mma.cuh"

using Stored = StoredScale<FORMAT>::type;
using Wide = TypeOf<INPUT>::type;

static_assert(TILE_M == 128 && ROWS == 8 && THREADS == 2 * TILE_M);

constexpr int OF_GATE = 0, OF_UP = 1, PRODUCT = 2;
constexpr int RESULTS = 3;

struct In {
    const void *grad, *gate, *up;
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

// 8 columns of a row of gate or up.
template <typename Type, Type TYPE>
struct KeptAs;

template <Fp8 TYPE>
struct KeptAs<Fp8, TYPE> {
    static constexpr bool SCALED = true;
    uint2 bytes;

    // Loads COUNT rows from `at.row + from` on; zeros outside of the matrix.
    template <bool WHOLE, int COUNT>
    static INLINE void load(KeptAs (&rows)[COUNT], const void* base, int stride, const In& in, Place at, int from) {
        const auto* const first =
            static_cast<const uint8_t*>(base) + (matrix() * in.M + at.row + from) * stride + at.column;
        const int inside = WHOLE ? COUNT : at.column < in.N ? in.M - at.row - from : 0;
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            rows[r].bytes = make_uint2(0, 0);
            if (r < inside) rows[r].bytes = load8(first + int64_t(r) * stride);
        }
    }

    // Pairs of columns, as float16.
    INLINE void unpack(uint32_t (&pairs)[4]) const {
        to_halves<TYPE>(bytes.x, pairs[0], pairs[1]);
        to_halves<TYPE>(bytes.y, pairs[2], pairs[3]);
    }

    static INLINE float value(uint32_t pair, int c, float scale) {
        return half_to_float(uint16_t(pair >> 16 * c)) * scale;
    }
};

template <Element TYPE>
struct KeptAs<Element, TYPE> {
    static_assert(TYPE == INPUT);
    static constexpr bool SCALED = false;
    Octet octet;

    template <bool WHOLE, int COUNT>
    static INLINE void load(KeptAs (&rows)[COUNT], const void* base, int stride, const In& in, Place at, int from) {
        Octet octets[COUNT];
        load_octets<LOAD, WHOLE>(octets, base, matrix() * in.M, at.row + from, at.column, in.M, in.N, stride);
#pragma unroll
        for (int r = 0; r < COUNT; ++r) rows[r].octet = octets[r];
    }

    INLINE void unpack(uint32_t (&pairs)[4]) const {
#pragma unroll
        for (int w = 0; w < 4; ++w) pairs[w] = octet.word[w];
    }

    static INLINE float value(uint32_t pair, int c, float) { return Octet::to_float(pair, c); }
};

using Kept = KeptAs<decltype(KEPT), KEPT>;
constexpr bool SCALED = Kept::SCALED;

// h in the registers of a thread: PAIR words have two columns. Maxima are taken of words.
template <bool ROUNDED>
struct ProductWords {
    static constexpr int PAIR = 1;
    using Values = PackedValues;
    using Max = LargerPair;
    static constexpr uint32_t MAGNITUDE = MAGNITUDES;

    static INLINE void set(uint32_t* words, float first, float second) { words[0] = pack<Wide>(first, second); }
    static INLINE void get(Values& values, int r, int i, uint4 words) {
        values.row[r] = {words.x, words.y, words.z, words.w};
    }
    // The bits of the largest magnitude of each of two columns, as float32.
    static INLINE uint2 bits(const uint32_t* words) {
        return make_uint2(PackedValues::widened(words[0], false), PackedValues::widened(words[0], true));
    }
};

template <>
struct ProductWords<false> {
    static constexpr int PAIR = 2;
    using Values = FloatValues;
    using Max = Larger;
    static constexpr uint32_t MAGNITUDE = 0x7fffffffu;

    static INLINE void set(uint32_t* words, float first, float second) {
        words[0] = __float_as_uint(first), words[1] = __float_as_uint(second);
    }
    static INLINE void get(Values& values, int r, int i, uint4 words) {
        float* const to = values.row[r] + 4 * i;
        to[0] = __uint_as_float(words.x), to[1] = __uint_as_float(words.y);
        to[2] = __uint_as_float(words.z), to[3] = __uint_as_float(words.w);
    }
    static INLINE uint2 bits(const uint32_t* words) { return make_uint2(words[0], words[1]); }
};

using Product = ProductWords<SCALED>;
constexpr int PRODUCT_WORDS = 4 * Product::PAIR;  // of a row in a thread

struct Shared {
    union {
        uint4 parked[ROWS * Product::PAIR][THREADS];  // h: each thread reads back its own
        Turned turned_product;
    };
    Turned turned[2];
    uint32_t amax[2][WARPS][TILE_N / 2];  // of two columns
    uint32_t product_amax[WARPS][TILE_N / 2 * Product::PAIR];
    float inverse[RESULTS][TILE_N];
    float scales[2][TILE_M];  // of the rows of gate and up
};

// Loads the scales of the tile's rows, of gate by one half of the threads and of up by the other.
template <bool WHOLE>
INLINE void load_scales(Shared& shared, const In& in) {
    const bool of_up = threadIdx.x >= TILE_M;
    const int row = blockIdx.y * TILE_M + threadIdx.x % TILE_M;
    const float* const scales = of_up ? in.up_scale : in.gate_scale;
    const int64_t first = (matrix() * blocks(in.N) + blockIdx.x) * (of_up ? in.up_lead : in.gate_lead);
    shared.scales[of_up][threadIdx.x % TILE_M] = WHOLE || row < in.M ? __ldg(scales + first + row) : 0.0f;
}

// The results of two columns of a row, from the words of their inputs: both gradients packed, and words of h.
INLINE void compute(uint32_t (&gradients)[2], uint32_t* product, uint32_t gates, uint32_t ups, float gate_scale,
                    float up_scale, uint32_t grads) {
    float values[RESULTS][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float gate = Kept::value(gates, c, gate_scale);
        const float up = Kept::value(ups, c, up_scale);
        const float grad = Octet::to_float(grads, c);
        const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-gate));
        const float gated = SCALED ? gate * sigmoid : silu(gate);  // the latter as in `quantize_silu_mul`
        values[OF_GATE][c] = grad * (up * sigmoid * (1.0f + gate * (1.0f - sigmoid)));
        values[OF_UP][c] = grad * gated;
        values[PRODUCT][c] = gated * up;
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        gradients[which] = pack<Wide>(values[which][0], values[which][1]);
        forget(gradients[which]);
    }
    Product::set(product, values[PRODUCT][0], values[PRODUCT][1]);
#pragma unroll
    for (int i = 0; i < Product::PAIR; ++i) forget(product[i]);
}

// Transposes a result, each column scaled by its inverse scale.
template <Fp8 TYPE, typename Values>
INLINE void turn_by(const Values& values, Shared& shared, int which, Place at) {
    float inverse[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) inverse[c] = shared.inverse[which][8 * at.octet + c];
    turn<TYPE>(values, inverse, which == PRODUCT ? shared.turned_product : shared.turned[which], at);
}

// Leaves the largest magnitudes of a warp's columns in its row of shared memory.
template <typename Max, int COUNT>
INLINE void exchange_maxima(uint32_t (&amax)[COUNT], uint32_t* row, Place at) {
#pragma unroll
    for (int w = 0; w < COUNT; ++w) amax[w] = Max()(amax[w], __shfl_xor_sync(~0u, amax[w], OTHER_ROWS));
    if (!(threadIdx.x & OTHER_ROWS)) {
#pragma unroll
        for (int w = 0; w < COUNT; w += 4) {
            *reinterpret_cast<uint4*>(row + COUNT * at.octet + w) =
                make_uint4(amax[w], amax[w + 1], amax[w + 2], amax[w + 3]);
        }
    }
}

// The largest magnitudes of two columns of h in all warps, as the bits of float32.
INLINE uint2 largest_of_product(const Shared& shared, int pair) {
    uint32_t largest[Product::PAIR] = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
#pragma unroll
        for (int i = 0; i < Product::PAIR; ++i) {
            largest[i] = Product::Max()(largest[i], shared.product_amax[w][Product::PAIR * pair + i]);
        }
    }
    return Product::bits(largest);
}

// The scales of the columns, of two of a result in each thread; one scale for all columns of h in squares.
template <bool WHOLE>
INLINE void make_column_scales(const In& in, const Out& out, Shared& shared) {
    constexpr int PAIRS = TILE_N / 2;
    if (threadIdx.x >= RESULTS * PAIRS) return;
    const int which = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS;
    const int block_m = blockIdx.y, block_n = blockIdx.x, column = block_n * TILE_N + 2 * pair;
    if (PRODUCT_SQUARE && which == PRODUCT) {
        // Each of the two warps looks at all columns.
        const uint2 mine = largest_of_product(shared, pair), other = largest_of_product(shared, pair ^ 32);
        const uint32_t largest = __reduce_max_sync(~0u, max(max(mine.x, mine.y), max(other.x, other.y)));
        const auto scale = block_scale<PRODUCT_FP8, FORMAT>(largest);
        shared.inverse[PRODUCT][2 * pair] = shared.inverse[PRODUCT][2 * pair + 1] = scale.inverse;
        const int64_t line = matrix() * blocks(in.N) + block_n;
        if (pair == 0) out.col_scale[PRODUCT][line * out.product_lead + block_m] = scale.stored;
        return;
    }
    uint2 bits;
    if (which == PRODUCT) {
        bits = largest_of_product(shared, pair);
    } else {
        uint32_t largest = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = __vmaxu2(largest, shared.amax[which][w][pair]);
        bits = make_uint2(PackedValues::widened(largest, false), PackedValues::widened(largest, true));
    }
    Stored* scales = which == PRODUCT ? out.col_scale[PRODUCT]
                     : which == OF_UP ? out.col_scale[OF_UP]
                                      : out.col_scale[OF_GATE];
    scales += (matrix() * blocks(in.M) + block_m) * (which == PRODUCT ? out.product_lead : out.col_lead) + column;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const uint32_t largest = c ? bits.y : bits.x;
        const auto scale = PRODUCT_FP8 != FP8 && which == PRODUCT ? block_scale<PRODUCT_FP8, FORMAT>(largest)
                                                                  : block_scale<FP8, FORMAT>(largest);
        shared.inverse[which][2 * pair + c] = scale.inverse;
        if (WHOLE || column + c < in.N) scales[c] = scale.stored;
    }
}

template <bool WHOLE>
INLINE void backward_tile(const In& in, const Out& out, Place at, Shared& shared) {
    // Loads and results. 16-bit inputs are loaded in two parts, as a tile at an edge is, whose checks take registers.
    constexpr int PART = WHOLE && SCALED ? ROWS : ROWS / 2;
    const int warp = threadIdx.x / 32;
    PackedValues of_gate, of_up;
    uint32_t product_amax[PRODUCT_WORDS] = {};  // of the columns of h
#pragma unroll
    for (int from = 0; from < ROWS; from += PART) {
        Octet grads[PART];
        Kept gate[PART], up[PART];
        const auto load_grads = [&] {
            load_octets<LOAD, WHOLE>(grads, in.grad, matrix() * in.M, at.row + from, at.column, in.M, in.N, in.grad_m);
        };
        if (!SCALED) load_grads();  // the order decides whether ptxas spills
        Kept::load<WHOLE>(gate, in.gate, in.gate_m, in, at, from);
        Kept::load<WHOLE>(up, in.up, in.up_m, in, at, from);
        if (SCALED) load_grads();
        if (SCALED && from == 0) {
            load_scales<WHOLE>(shared, in);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < PART; ++i) {
            const int r = from + i, row = ROWS * at.group + r;
            const float gate_scale = SCALED ? shared.scales[0][row] : 1.0f;
            const float up_scale = SCALED ? shared.scales[1][row] : 1.0f;
            uint32_t gates[4], ups[4], product[PRODUCT_WORDS];
            gate[i].unpack(gates);
            up[i].unpack(ups);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t gradients[2];
                compute(gradients, product + Product::PAIR * w, gates[w], ups[w], gate_scale, up_scale,
                        grads[i].word[w]);
                of_gate.row[r].word[w] = gradients[OF_GATE];
                of_up.row[r].word[w] = gradients[OF_UP];
            }
#pragma unroll
            for (int w = 0; w < PRODUCT_WORDS; ++w) {
                product_amax[w] = Product::Max()(product_amax[w], product[w] & Product::MAGNITUDE);
            }
#pragma unroll
            for (int w = 0; w < PRODUCT_WORDS; w += 4) {
                shared.parked[Product::PAIR * r + w / 4][threadIdx.x] =
                    make_uint4(product[w], product[w + 1], product[w + 2], product[w + 3]);
            }
        }
    }

    // Maxima.
    exchange_maxima<Product::Max>(product_amax, shared.product_amax[warp], at);
    uint32_t amax[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) amax[w] = of_gate.column_words(w);
    of_gate.pack_again();
    exchange_maxima<LargerPair>(amax, shared.amax[OF_GATE][warp], at);
#pragma unroll
    for (int w = 0; w < 4; ++w) amax[w] = of_up.column_words(w);
    of_up.pack_again();
    exchange_maxima<LargerPair>(amax, shared.amax[OF_UP][warp], at);
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
    Product::Values product;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < Product::PAIR; ++i) {
            Product::get(product, r, i, shared.parked[Product::PAIR * r + i][threadIdx.x]);
        }
    }
    __syncthreads();  // all have read what they parked
    turn_by<PRODUCT_FP8>(product, shared, PRODUCT, at);
    __syncthreads();
    const int64_t columns = matrix() * in.N * out.col_n;
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
        store_turned<WHOLE, false>(i == PRODUCT ? shared.turned_product : shared.turned[i], out.col_data[i] + columns,
                                   out.col_n, blockIdx.y * TILE_M, blockIdx.x * TILE_N, in.M, in.N, TILE_M);
    }
}

// Row-major data has strides (row_m, 1), column-major data (1, col_n). Scales of rows have strides (1, row_lead), those
// of columns (col_lead, 1), those of h (product_lead, 1) or, of squares, (1, product_lead). Matrices of a batch follow
// each other.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    silu_mul_backward(const void* grad, const void* gate, const float* gate_scale, const void* up,
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

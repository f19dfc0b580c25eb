// Few rows by an MX-FP8 weight: out (B, M, N) = a (B, M, K) · b (B, K, N) + bias (N), M up to ROWS.
//
// The product is bound by the bytes of the weight, and each is read once. A wave has COLUMNS columns of b, and a lane
// 16 of each 1024 elements along K, by one load. The lane widens them to float32 and multiplies them by the same
// elements of every row of a, which other waves read as well and the caches hold; it applies both scales to each sum of
// 16 by one ldexp. UNROLL such loads of each column are in flight. At the end the lanes' sums are added in a fixed
// order.
//
// K is a multiple of 32 and contiguous, from a multiple of 16 bytes on. Strides count elements. What a wave reads of
// one operand lies within 2 GiB.
//
// Macros: ROWS (1, 2, 4, 8, 16); OUT and BIAS of the enum Element.
#include "wave.h"

constexpr int WAVES = 4;
constexpr int THREADS = WAVES * WAVE;
constexpr int COLUMNS = ROWS <= 2 ? 1 : ROWS <= 8 ? 2 : 4;
constexpr int UNROLL = 4 / COLUMNS;
constexpr int BK = 16 * WAVE;  // the K tile of a wave: 16 elements a lane
constexpr int GROUP = 4;  // pieces of rows, of one K tile or several; one group is in flight while another is used
constexpr int GROUPS = UNROLL * ROWS / GROUP;
constexpr int COUNT = ROWS * COLUMNS;
constexpr int SPREAD = COUNT < WAVE ? WAVE / COUNT : 1;  // lanes that end with the same sum
constexpr int KEPT = COUNT < WAVE ? 1 : COUNT / WAVE;  // sums that a lane ends with
constexpr int NAN_SCALE = 255;

using Out = TypeOf<OUT>::type;
using Bias = TypeOf<Element(BIAS)>::type;
constexpr bool HAS_BIAS = Element(BIAS) != Element::NONE;

// 16 elements along K and the exponent of their scale, as stored.
struct Piece {
    Words words;
    int exponent;
};

// Widens 16 values to 8 pairs.
INLINE void widen(Words words, Pair (&pairs)[8]) {
    const uint32_t word[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = widened<false>(word[i]);
        pairs[2 * i + 1] = widened<true>(word[i]);
    }
}

INLINE float dot(const Pair (&a)[8], const Pair (&b)[8]) {
    Pair sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = multiply_add(a[i], b[i], sum);
    return sum.x + sum.y;
}

// Reduces LEFT values over all lanes. Each step halves the number of values of a lane while it has several, so that
// lane l ends with the KEPT values from l / SPREAD * KEPT on.
template <int MASK, int LEFT>
INLINE void sum_lanes(float (&sums)[COUNT]) {
    if constexpr (MASK > 0) {
        constexpr int NEXT = LEFT > 1 ? LEFT / 2 : 1;
#pragma unroll
        for (int i = 0; i < NEXT; ++i) sums[i] = folded<MASK>(sums[i], sums[LEFT > 1 ? i + NEXT : i]);
        sum_lanes<MASK / 2, NEXT>(sums);
    }
}

KERNEL(THREADS)
void mxfp8_gemv(const uint8_t* a, const uint8_t* a_scale, const uint8_t* b, const uint8_t* b_scale, const Bias* bias,
                Out* out, int M, int N, int K, int a_row, int as_row, int as_block, int b_column, int bs_column,
                int bs_block, int64_t a_batch, int64_t as_batch, int64_t b_batch, int64_t bs_batch) {
    const int tiles = (N + WAVES * COLUMNS - 1) / (WAVES * COLUMNS);
    const int batch = block_x() / tiles;
    const int wave = uniform(thread_index() / WAVE), lane = thread_index() % WAVE;
    const int n = (block_x() % tiles * WAVES + wave) * COLUMNS;
    const int columns = N - n < COLUMNS ? N - n : COLUMNS;
    if (columns <= 0) return;

    const int blocks = K / 32;
    const Buffer rows = buffer_of(a + batch * a_batch, (M - 1) * a_row + K);
    const Buffer row_scales = buffer_of(a_scale + batch * as_batch, (M - 1) * as_row + (blocks - 1) * as_block + 1);
    const Buffer weight = buffer_of(b + batch * b_batch + int64_t(n) * b_column, (columns - 1) * b_column + K);
    const Buffer weight_scales = buffer_of(b_scale + batch * bs_batch + int64_t(n) * bs_column,
                                           (columns - 1) * bs_column + (blocks - 1) * bs_block + 1);

    auto load = [&](Buffer data, Buffer scales, int line, int scale_line, int block, int k, bool inside) {
        return Piece{load16(data, inside ? line + k : OUTSIDE),
                     int(load1(scales, inside ? scale_line + (k >> 5) * block : OUTSIDE))};
    };
    // Rows past M and columns past N have sums of arbitrary loaded values, or of zeros, which nobody stores.
    float sums[COUNT] = {};
    // Main loop.
    for (int start = 0; start < K; start += UNROLL * BK) {
        const int first = start + 16 * lane;
        Piece columns_of[UNROLL][COLUMNS], rows_of[2][GROUP];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int k = first + u * BK;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                columns_of[u][c] = load(weight, weight_scales, c * b_column, c * bs_column, bs_block, k, k < K);
            }
        }
        auto load_rows = [&](int group) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int index = group * GROUP + i, r = index % ROWS, k = first + index / ROWS * BK;
                rows_of[group % 2][i] = load(rows, row_scales, r * a_row, r * as_row, as_block, k, k < K && r < M);
            }
        };
        load_rows(0);
        Pair right[COLUMNS][8];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (group + 1 < GROUPS) load_rows(group + 1);
            keep_order();
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int r = (group * GROUP + i) % ROWS, u = (group * GROUP + i) / ROWS;
                const Piece& row = rows_of[group % 2][i];
                Pair left[8];
                widen(row.words, left);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const Piece& column = columns_of[u][c];
                    if (r == 0) widen(column.words, right[c]);
                    const float product = scaled(dot(left, right[c]), row.exponent + column.exponent - 2 * 127);
                    const bool is_nan = row.exponent == NAN_SCALE || column.exponent == NAN_SCALE;
                    sums[r * COLUMNS + c] += is_nan ? not_a_number() : product;
                }
            }
        }
    }

    // Epilogue: reduce over the lanes, add the bias, store.
    sum_lanes<WAVE / 2, COUNT>(sums);
    if (lane % SPREAD) return;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int index = lane / SPREAD * KEPT + i, row = index / COLUMNS, column = index % COLUMNS;
        if (row >= M || column >= columns) continue;
        float sum = sums[i];
        if constexpr (HAS_BIAS) sum += float(bias[n + column]);
        out[(int64_t(batch) * M + row) * N + n + column] = Out(sum);
    }
}

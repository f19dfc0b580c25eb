// Up to 64 rows by an MX-FP8 weight, by the scaled MFMA: out (B, M, N) = a (B, M, K) · b (B, K, N) + bias (N).
//
// Decomposition. A block has COLUMNS columns of b and all rows of a. Its WAVES waves share K and take K tiles of 128 in
// turn: a row or a column of a K tile is one cache line. A K tile takes one instruction for each 16 x 16 of the
// product, with scales in the lanes. The sums of the waves are reduced through LDS, in a fixed order.
//
// Blocks along y share K further: each stores its part of the sum in float32, `out_part` elements after the part
// before, and `mxfp8_sum_parts` adds the parts. A block has `steps` K tiles.
//
// K is a multiple of 32 and contiguous, from a multiple of 16 bytes on. Strides count elements. What a block reads of
// one operand lies within 2 GiB.
//
// Macros: TILES_M (of 16 rows, 1..4), N_SUB (tiles of 16 columns: 1, 2, 4); OUT and BIAS of the enum Element.
#include "wave.h"

constexpr int WAVES = 4;
constexpr int THREADS = WAVES * WAVE;
constexpr int COLUMNS = 16 * N_SUB;
constexpr int TILES = TILES_M * N_SUB;
constexpr int BK = 128;  // the K tile
constexpr int UNROLL = 4 / N_SUB;  // K tiles of a wave in flight

using Out = TypeOf<OUT>::type;
using Bias = TypeOf<Element(BIAS)>::type;
constexpr bool HAS_BIAS = Element(BIAS) != Element::NONE;

// A lane's part of 16 rows of a, or 16 columns of b, in a K tile.
struct Fragment {
    Words words[2];
    uint32_t scale;
};

KERNEL(THREADS)
void mxfp8_mfma(const uint8_t* a, const uint8_t* a_scale, const uint8_t* b, const uint8_t* b_scale, const Bias* bias,
                Out* out, int M, int N, int K, int steps, int a_row, int as_row, int as_block, int b_column,
                int bs_column, int bs_block, int64_t a_batch, int64_t as_batch, int64_t b_batch, int64_t bs_batch,
                int64_t out_part) {
    __shared__ Sums parts[WAVES][TILES][WAVE];
    const int tiles_n = (N + COLUMNS - 1) / COLUMNS;
    const int batch = block_x() / tiles_n, n = block_x() % tiles_n * COLUMNS;
    const int columns = N - n < COLUMNS ? N - n : COLUMNS;
    const int wave = uniform(thread_index() / WAVE), lane = thread_index() % WAVE;
    const int row = lane % 16, group = lane / 16;
    const int begin = block_y() * steps * BK;
    const int end = K - begin < steps * BK ? K : begin + steps * BK;

    const int blocks = K / 32;
    const Buffer rows = buffer_of(a + batch * a_batch, (M - 1) * a_row + K);
    const Buffer row_scales = buffer_of(a_scale + batch * as_batch, (M - 1) * as_row + (blocks - 1) * as_block + 1);
    const Buffer weight = buffer_of(b + batch * b_batch + int64_t(n) * b_column, (columns - 1) * b_column + K);
    const Buffer weight_scales = buffer_of(b_scale + batch * bs_batch + int64_t(n) * bs_column,
                                           (columns - 1) * bs_column + (blocks - 1) * bs_block + 1);

    // Rows past M and columns past N have sums of arbitrary loaded values, or of zeros, which nobody stores.
    auto load = [&](Buffer data, Buffer scales, int line, int scale_line, int block, int start) {
        auto piece = [&](int k) { return load16(data, k < end ? line + k : OUTSIDE); };
        const int k = start + 32 * group;  // where the 32 elements begin whose scale the lane loads
        return Fragment{{piece(start + 16 * group), piece(start + 64 + 16 * group)},
                        load1(scales, k < end ? scale_line + (k >> 5) * block : OUTSIDE)};
    };

    // Main loop: load UNROLL K tiles, then multiply them.
    Sums sums[TILES_M][N_SUB] = {};
    for (int first = begin + wave * BK; first < end; first += UNROLL * WAVES * BK) {
        Fragment left[UNROLL][TILES_M], right[UNROLL][N_SUB];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int start = first + u * WAVES * BK;
#pragma unroll
            for (int j = 0; j < N_SUB; ++j) {
                const int column = 16 * j + row;
                right[u][j] = load(weight, weight_scales, column * b_column, column * bs_column, bs_block, start);
            }
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
                const int m = 16 * i + row;
                left[u][i] = load(rows, row_scales, m * a_row, m * as_row, as_block, start);
            }
        }
        keep_order();
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
                for (int j = 0; j < N_SUB; ++j) {
                    const Fragment &x = left[u][i], &w = right[u][j];
                    sums[i][j] = multiply_scaled(x.words, w.words, x.scale, w.scale, sums[i][j]);
                }
            }
        }
    }

    // Epilogue: reduce over the waves through LDS, add the bias, store.
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < N_SUB; ++j) parts[wave][i * N_SUB + j][lane] = sums[i][j];
    }
    block_barrier();
    out += block_y() * out_part + int64_t(batch) * M * N;
    for (int index = thread_index(); index < TILES * WAVE; index += THREADS) {
        const int tile = index / WAVE, from = index % WAVE;
        Sums total = parts[0][tile][from];
#pragma unroll
        for (int part = 1; part < WAVES; ++part) total = total + parts[part][tile][from];
        const float values[4] = {total.x, total.y, total.z, total.w};
        const int column = n + tile % N_SUB * 16 + from % 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = tile / N_SUB * 16 + from / 16 * 4 + i;
            if (m >= M || column >= N) continue;
            float sum = values[i];
            if constexpr (HAS_BIAS) sum += float(bias[column]);
            out[int64_t(m) * N + column] = Out(sum);
        }
    }
}

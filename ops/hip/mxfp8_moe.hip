// Products of routed tokens with their experts, MX-FP8: out[id] = weight[id] * (a[id / a_div] · w[expert]).
//
// Decomposition. `sorted_token_ids` has `block_m` ids a tile, and `expert_ids` the expert of each tile. A block has
// BLOCK_N columns of one expert and up to 16 * TILES_M ids of one tile, whose rows of a its lanes gather. Its WAVES
// waves share K as in `mxfp8_mfma`. Blocks of tiles past `num_tokens_post_padded`, or without an expert, exit at once;
// ids that name no row of out are padding. So the launch does not depend on the routing, and rows of out that no id
// names stay as they are.
//
// w is (E, K, N). K is a multiple of 32 and contiguous, from a multiple of 16 bytes on. Strides count elements. a, its
// scales, and what a block reads of w, lie within 2 GiB each.
//
// Macros: BLOCK_N (8, 16), TILES_M (1..4), WEIGHTED (0, 1); OUT of the enum Element.
#include "wave.h"

constexpr int WAVES = 4;
constexpr int THREADS = WAVES * WAVE;
constexpr int BK = 128;  // the K tile
constexpr int UNROLL = TILES_M <= 2 ? 4 : 2;  // K tiles of a wave in flight
constexpr int PADDING = -1;

using Out = TypeOf<OUT>::type;

// A lane's part of 16 rows of a, or 16 columns of w, in a K tile.
struct Fragment {
    Words words[2];
    uint32_t scale;
};

KERNEL(THREADS)
void mxfp8_moe(const uint8_t* a, const uint8_t* a_scale, const uint8_t* w, const uint8_t* w_scale,
               const int* sorted_token_ids, const int* expert_ids, const int* num_tokens_post_padded,
               const float* token_weights, Out* out, int ids, int N, int K, int E, int block_m, int a_div, int a_row,
               int as_row, int as_block, int w_column, int ws_column, int ws_block, int64_t w_expert,
               int64_t ws_expert) {
    __shared__ Sums sums_of_waves[WAVES][TILES_M][WAVE];
    const int tiles_n = (N + BLOCK_N - 1) / BLOCK_N, parts = (block_m + 16 * TILES_M - 1) / (16 * TILES_M);
    const int n = block_x() % tiles_n * BLOCK_N, place = block_x() / tiles_n;
    const int tile = place / parts, first_row = place % parts * 16 * TILES_M;
    const int start = tile * block_m;
    if (start >= *num_tokens_post_padded) return;
    const int expert = expert_ids[tile];
    if (expert < 0 || expert >= E) return;

    const int columns = N - n < BLOCK_N ? N - n : BLOCK_N;
    const int wave = uniform(thread_index() / WAVE), lane = thread_index() % WAVE;
    const int line = lane % 16, group = lane / 16;

    const int blocks = K / 32, rows = ids / a_div;
    const Buffer activations = buffer_of(a, (rows - 1) * a_row + K);
    const Buffer scales = buffer_of(a_scale, (rows - 1) * as_row + (blocks - 1) * as_block + 1);
    const Buffer weight = buffer_of(w + expert * w_expert + int64_t(n) * w_column, (columns - 1) * w_column + K);
    const Buffer weight_scales = buffer_of(w_scale + expert * ws_expert + int64_t(n) * ws_column,
                                           (columns - 1) * ws_column + (blocks - 1) * ws_block + 1);

    auto id_at = [&](int row) {
        const int id = first_row + row < block_m ? sorted_token_ids[start + first_row + row] : PADDING;
        return id >= 0 && id < ids ? id : PADDING;
    };
    int source[TILES_M];  // rows of a; nothing is loaded for padding
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        const int id = id_at(16 * i + line);
        source[i] = id == PADDING ? PADDING : id / a_div;
    }
    auto load = [&](Buffer data, Buffer scales, int data_line, int scale_line, int block, int start, int end) {
        auto piece = [&](int k) { return load16(data, k < end ? data_line + k : OUTSIDE); };
        const int k = start + 32 * group;  // where the 32 elements begin whose scale the lane loads
        return Fragment{{piece(start + 16 * group), piece(start + 64 + 16 * group)},
                        load1(scales, k < end ? scale_line + (k >> 5) * block : OUTSIDE)};
    };

    // Main loop: load UNROLL K tiles, then multiply them.
    Sums sums[TILES_M] = {};
    for (int first = wave * BK; first < K; first += UNROLL * WAVES * BK) {
        Fragment left[UNROLL][TILES_M], right[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int k = first + u * WAVES * BK;
            right[u] =
                load(weight, weight_scales, line * w_column, line * ws_column, ws_block, k, line < BLOCK_N ? K : 0);
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
                left[u][i] = load(activations, scales, source[i] * a_row, source[i] * as_row, as_block, k,
                                  source[i] == PADDING ? 0 : K);
            }
        }
        keep_order();
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
                const Fragment& x = left[u][i];
                sums[i] = multiply_scaled(x.words, right[u].words, x.scale, right[u].scale, sums[i]);
            }
        }
    }

    // Epilogue: reduce over the waves through LDS, apply the weight, store.
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) sums_of_waves[wave][i][lane] = sums[i];
    block_barrier();
    for (int index = thread_index(); index < TILES_M * WAVE; index += THREADS) {
        const int i = index / WAVE, from = index % WAVE, column = from % 16;
        Sums total = sums_of_waves[0][i][from];
#pragma unroll
        for (int part = 1; part < WAVES; ++part) total = total + sums_of_waves[part][i][from];
        const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int id = id_at(16 * i + from / 16 * 4 + r);
            if (id == PADDING || column >= columns) continue;
            float sum = values[r];
#if WEIGHTED
            sum *= token_weights[id];
#endif
            out[int64_t(id) * N + n + column] = Out(sum);
        }
    }
}

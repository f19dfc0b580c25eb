// What kernels of 16-bit rows by an FP8 weight share: the type of the rows, the weight's kinds of scales, and lines of it
// widened to the left operand of wgmma.
//
// Macros: INPUT (BF16, FP16); SCALE, of w: LINE (one for all of K, of each column), VECTOR (one for a column and 128 of K) or
// BLOCK (one for 128 columns and 128 of K).
#pragma once
#include "hopper.cuh"
#include "mma.cuh"

using XType = TypeOf<INPUT>::type;

#define LINE 1
#define VECTOR 2
#define BLOCK 3

// Brings the scales of `steps` times 128 of K, from `first` on, and of COLUMNS from `column` on to shared memory: of BLOCK one
// for 64 columns, of VECTOR one for each, of LINE those that hold for all of K. By COUNT threads.
template <int COLUMNS, int COUNT>
INLINE void read_scales(float* to, const float* w_scale, int first, int steps, int column, int N, int s_k, int s_n) {
    constexpr int ALONG = SCALE == BLOCK ? COLUMNS / 64 : COLUMNS;
    for (int i = threadIdx.x; i < (SCALE == LINE ? COLUMNS : steps * ALONG); i += COUNT) {
        const int step = i / ALONG, own = min(column + i % ALONG * (COLUMNS / ALONG), N - 1);
        const int n = SCALE == BLOCK ? own / 128 : own;
        to[i] = load_constant(w_scale + int64_t(SCALE == LINE ? 0 : first + step) * s_k + int64_t(n) * s_n);
    }
}

// 128 of K of lines `line` and `line + 8` of w, which lie at `w` in rows of 128 bytes that a bulk copy has swizzled, as the
// thread's parts of eight fragments. It has elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16, which are one piece of a
// line; pieces of a line are exchanged by the swizzle. `adapt` changes each fragment.
template <Fp8 TYPE, typename Adapt>
INLINE void widen_lines(uint32_t (&a)[8][4], uint32_t w, int line, Adapt adapt) {
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
        const uint32_t at = w + line * 128 + ((piece ^ (line % 8)) * 16) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t from = at + half * 1024;
            widen<XType, TYPE>(load_shared_pair_of_bytes(from) | load_shared_pair_of_bytes(from + 8) << 16,
                               a[piece][half], a[piece][half + 2]);
        }
        adapt(a[piece]);
    }
}

// Keeps what is widened, all of it, before the first product that reads it.
INLINE void settle_fragments(uint32_t (&a)[8][4]) {
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[piece][i])::"memory");
    }
}

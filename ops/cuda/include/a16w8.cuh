// Functions that the products of 16-bit rows by an FP8 weight share: the type of the rows, the scales of the weight,
// and lines of the weight widened to the left operand of wgmma.
//
// Macros: INPUT (BF16, FP16) of the enum Element; SCALE, the scales of w: LINE, VECTOR or BLOCK (`scale_kinds.cuh`).
#pragma once
#include "hopper.cuh"
#include "mma.cuh"
#include "scale_kinds.cuh"

using XType = TypeOf<INPUT>::type;

// Copies the scales of `steps` K tiles of 128, from K tile `first` on, and of COLUMNS columns from `column` on to
// shared memory, by COUNT threads: for BLOCK one scale for 64 columns, for VECTOR one for each column, for LINE those
// of all of K.
template <int COLUMNS, int COUNT>
INLINE void read_scales(float* to, const float* w_scale, int first, int steps, int column, int N, int s_k, int s_n) {
    constexpr int ALONG = SCALE == BLOCK ? COLUMNS / 64 : COLUMNS;
    for (int i = threadIdx.x; i < (SCALE == LINE ? COLUMNS : steps * ALONG); i += COUNT) {
        const int step = i / ALONG, own = min(column + i % ALONG * (COLUMNS / ALONG), N - 1);
        const int n = SCALE == BLOCK ? own / 128 : own;
        to[i] = load_constant(w_scale + int64_t(SCALE == LINE ? 0 : first + step) * s_k + int64_t(n) * s_n);
    }
}

// Widens 128 of K of lines `line` and `line + 8` of w into the thread's registers of eight wgmma fragments. The lines
// lie at `w` in rows of 128 bytes, swizzled by TMA: piece `piece` of a line is at `piece ^ line % 8`. A thread has
// elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16, one piece of a line. `convert(bytes, half, low, high)` makes
// two pairs of four bytes of line `line + 8 * half`.
template <typename Convert>
INLINE void widen_lines(uint32_t (&a)[8][4], uint32_t w, int line, Convert convert) {
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
        const uint32_t at = w + line * 128 + ((piece ^ (line % 8)) * 16) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t from = at + half * 1024;
            convert(load_shared_pair_of_bytes(from) | load_shared_pair_of_bytes(from + 8) << 16, half, a[piece][half],
                    a[piece][half + 2]);
        }
    }
}

// Makes the compiler finish all fragments before the first product that reads them.
INLINE void settle_fragments(uint32_t (&a)[8][4]) {
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[piece][i])::"memory");
    }
}

// Reduction of wgmma's accumulators for few rows. Where the blocks of a cluster share K, each accumulator is sent to
// the block that stores it, which adds what it receives in the order of K; a block alone stores its own sums. Both
// store pairs of columns.
//
// A warp has 16 columns of the weight. A thread has two of them, 8 apart, and of each 8 rows of x rows 2 * quarter and
// 2 * quarter + 1. Each block of a cluster stores the columns of OWN_WARPS warps, and each thread one of these columns.
//
// Macros: those of few_rows.cuh; SCALE, of a16w8.cuh.
#pragma once
#include "a16w8.cuh"
#include "few_rows.cuh"

constexpr int OWN_WARPS = (WARPS_N + CLUSTER - 1) / CLUSTER;
constexpr int OF_THREAD = ROWS / 4;  // rows for each thread
// Received sums: (CLUSTER, columns of the block, 4, OF_THREAD).
constexpr int SUMS_BYTES = CLUSTER > 1 ? CLUSTER * OWN_WARPS * 16 * ROWS * 4 : 0;
constexpr int PAIRS = CLUSTER > 1 ? 1 : 2;  // pairs of columns, 8 apart, that a thread stores in a row
static_assert(CLUSTER == 1 || 64 * OWN_WARPS <= THREADS);
static_assert(TILES == 1 && WARPS_K == 1 && (SLICES == 1 || SLICES % 2 == 0));

INLINE int own_columns(uint32_t rank) { return 16 * min(max(WARPS_N - int(rank) * OWN_WARPS, 0), OWN_WARPS); }

// Bytes that a block receives, for its mbarrier: threads without a row send nothing.
INLINE int bytes_of_sums(int rows, uint32_t rank) {
    return CLUSTER * own_columns(rank) * (SLICES > 1 ? 4 : (rows + 1) / 2) * OF_THREAD * 4;
}

// The first column of a thread's pairs in its block, and its first row. Of two neighbouring columns one thread stores
// the even rows and one the odd rows; its next rows are 8 apart.
INLINE int first_pair(uint32_t rank, int warp) {
    const int group = threadIdx.x % 32 / 4;
    const int column = CLUSTER > 1 ? 16 * OWN_WARPS * rank + warp * 8 + group : warp * 16 + group;
    return column / 2 * 2;
}
INLINE int first_row() { return 2 * (threadIdx.x % 4) + threadIdx.x / 4 % 2; }

// Loads the biases of a thread's pairs. The first pair is that of column `first`, from which on `room` columns exist;
// the biases of the matrix begin at `start`.
INLINE void read_biases(float2 (&biases)[PAIRS], const BiasType* bias, int64_t start, int first, int room, int bias_n) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const BiasType* const from = bias + start + int64_t(first + 8 * i) * bias_n;
        biases[i].x = room > 8 * i ? float(from[0]) : 0.0f;
        biases[i].y = room > 8 * i + 1 ? float(from[bias_n]) : 0.0f;
    }
}

// Exchanges a thread's column of two rows for two columns of one row with the thread of the neighbouring column.
INLINE float2 turned(float even_row, float odd_row) {
    const int odd = threadIdx.x / 4 % 2;
    const float kept = odd ? odd_row : even_row;
    const float other = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
    return odd ? make_float2(other, kept) : make_float2(kept, other);
}

// Sends a thread's sums to the blocks that store them, where SUMS_BYTES begin at `sums`, and the mbarrier is `barrier`.
// All blocks of the cluster must have begun.
INLINE void send_sums(uint32_t sums, uint32_t barrier, const float (&acc)[SLICES][4], int rows, int rank, int warp) {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const int block = warp / OWN_WARPS, column = (rank * OWN_WARPS + warp % OWN_WARPS) * 16 + group;
    if (SLICES == 1 && 2 * quarter >= rows) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t to = sums + ((column + 8 * half) * 4 + quarter) * OF_THREAD * 4;
        if constexpr (SLICES == 1) {
            send_to_block(to, barrier, block, make_float2(acc[0][2 * half], acc[0][2 * half + 1]));
        } else {
#pragma unroll
            for (int s = 0; s < SLICES; s += 2)
                send_to_block(to + 8 * s, barrier, block,
                              make_float4(acc[s][2 * half], acc[s][2 * half + 1], acc[s + 1][2 * half],
                                          acc[s + 1][2 * half + 1]));
        }
    }
}

// Waits for all sums that this block receives, adds them, and calls `finish(slice, 0, sums)`.
template <typename Finish>
INLINE void add_sums(const char* sums, uint32_t barrier, uint32_t rank, Finish finish) {
    barrier_wait(barrier, 0);
    if (threadIdx.x >= own_columns(rank) * 4) return;
    float total[OF_THREAD] = {};
#pragma unroll
    for (int sender = 0; sender < CLUSTER; ++sender) {
        const float* const from =
            reinterpret_cast<const float*>(sums) + (sender * OWN_WARPS * 64 + threadIdx.x) * OF_THREAD;
#pragma unroll
        for (int j = 0; j < OF_THREAD; ++j) total[j] = sender == 0 ? from[j] : total[j] + from[j];
    }
#pragma unroll
    for (int s = 0; s < SLICES; ++s) finish(s, 0, turned(total[2 * s], total[2 * s + 1]));
}

// Calls `finish(slice, which of PAIRS, sums)` for the sums of a block that is alone.
template <typename Finish>
INLINE void turn_sums(const float (&acc)[SLICES][4], Finish finish) {
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) finish(s, half, turned(acc[s][2 * half], acc[s][2 * half + 1]));
    }
}

// Reduces over the cluster, or not at all, and finishes each pair of sums. SUMS_BYTES begin at byte `sums` of `memory`.
template <typename Finish>
INLINE void finish_sums(const float (&acc)[SLICES][4], const char* memory, uint32_t sums, uint32_t barrier, int rows,
                        uint32_t rank, int warp, Finish finish) {
    if constexpr (CLUSTER > 1) {
        cluster_wait();  // all blocks have begun
        send_sums(shared_address(memory) + sums, barrier, acc, rows, rank, warp);
        add_sums(memory + sums, barrier, rank, finish);
    } else {
        turn_sums(acc, finish);
    }
}

// The scales in K tile `step` of a thread's two columns, `column` and 8 further; 1 where they hold along K (LINE).
INLINE float2 scales_of_columns(const float* w_scales, int step, int warp, int column) {
    if constexpr (SCALE == VECTOR) return make_float2(w_scales[step * BN + column], w_scales[step * BN + column + 8]);
    const float scale = SCALE == BLOCK ? w_scales[step * (BN / 64) + warp / 4] : 1.0f;
    return make_float2(scale, scale);
}

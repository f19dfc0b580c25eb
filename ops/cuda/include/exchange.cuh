// Sums of wgmma's accumulators of few rows: where a cluster's blocks share K, each goes straight to the block that stores
// it, where they are added in the order of K; a block alone stores its own. They are stored as pairs of columns.
//
// A warp has 16 columns of the weight, a thread two of them, 8 apart, and of each 8 rows of x two, 2 * quarter and the next.
// Blocks of a cluster store the columns of OWN_WARPS warps, a thread one column of them.
//
// Macros: those of few_rows.cuh.
#pragma once
#include "few_rows.cuh"

constexpr int OWN_WARPS = (WARPS_N + CLUSTER - 1) / CLUSTER;
constexpr int OF_THREAD = ROWS / 4;  // rows
// (CLUSTER, columns of the block, 4, OF_THREAD)
constexpr int SUMS_BYTES = CLUSTER > 1 ? CLUSTER * OWN_WARPS * 16 * ROWS * 4 : 0;
constexpr int PAIRS = CLUSTER > 1 ? 1 : 2;  // of columns that a thread stores in a row, 8 apart
static_assert(CLUSTER == 1 || 64 * OWN_WARPS <= THREADS);
static_assert(TILES == 1 && WARPS_K == 1 && (SLICES == 1 || SLICES % 2 == 0));

INLINE int own_columns(uint32_t rank) { return 16 * min(max(WARPS_N - int(rank) * OWN_WARPS, 0), OWN_WARPS); }

// What arrives at a block, for its barrier: threads that have no row send nothing.
INLINE int bytes_of_sums(int rows, uint32_t rank) {
    return CLUSTER * own_columns(rank) * (SLICES > 1 ? 4 : (rows + 1) / 2) * OF_THREAD * 4;
}

// Where a thread's pairs begin, in its block, and its first row. Of two neighbouring columns one thread stores the even rows,
// one the odd ones; further rows are 8 apart.
INLINE int first_pair(uint32_t rank, int warp) {
    const int group = threadIdx.x % 32 / 4;
    const int column = CLUSTER > 1 ? 16 * OWN_WARPS * rank + warp * 8 + group : warp * 16 + group;
    return column / 2 * 2;
}
INLINE int first_row() { return 2 * (threadIdx.x % 4) + threadIdx.x / 4 % 2; }

// The biases of a thread's pairs, of which the first is that of column `first`, where `room` columns begin; those of the
// matrix begin at `start`.
INLINE void read_biases(float2 (&biases)[PAIRS], const BiasType* bias, int64_t start, int first, int room, int bias_n) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const BiasType* const from = bias + start + int64_t(first + 8 * i) * bias_n;
        biases[i].x = room > 8 * i ? float(from[0]) : 0.0f;
        biases[i].y = room > 8 * i + 1 ? float(from[bias_n]) : 0.0f;
    }
}

// A thread's column of two rows as two columns of its own row.
INLINE float2 turned(float even_row, float odd_row) {
    const int odd = threadIdx.x / 4 % 2;
    const float kept = odd ? odd_row : even_row;
    const float other = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
    return odd ? make_float2(other, kept) : make_float2(kept, other);
}

// Brings a thread's sums to where `SUMS_BYTES` begin at `sums`, in the block that stores them, whose barrier is `barrier`.
// All blocks of the cluster have begun.
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

// Waits for all sums of a cluster's block, adds them, and calls `finish(slice, 0, sums)`.
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

// Calls `finish(slice, of PAIRS, sums)` for what the thread of a block alone has.
template <typename Finish>
INLINE void turn_sums(const float (&acc)[SLICES][4], Finish finish) {
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) finish(s, half, turned(acc[s][2 * half], acc[s][2 * half + 1]));
    }
}

// The end of a block: those two, or what the thread of a block alone has. `sums` is where SUMS_BYTES begin in `memory`.
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

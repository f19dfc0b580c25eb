// Sums of wgmma's accumulators of few rows, whose K is shared: each goes straight to the block of the cluster that stores
// it, where they are added in the order of K.
//
// A warp has 16 columns of the weight, a thread two of them, 8 apart, and of each 8 rows of x two, 2 * quarter and the next.
// Blocks store the columns of OWN_WARPS warps.
//
// Macros: those of narrow.cuh.
#pragma once
#include "narrow.cuh"

constexpr int OWN_WARPS = (WARPS_N + CLUSTER - 1) / CLUSTER;
constexpr int OF_THREAD = ROWS / 4;  // rows
constexpr int SUMS_BYTES = CLUSTER * OWN_WARPS * 16 * ROWS * 4;  // (CLUSTER, columns of the block, 4, OF_THREAD)
static_assert(TILES == 1 && WARPS_K == 1 && (SLICES == 1 || SLICES % 2 == 0));

INLINE int own_columns(uint32_t rank) { return 16 * min(max(WARPS_N - int(rank) * OWN_WARPS, 0), OWN_WARPS); }

// What arrives at a block, for its barrier: threads that have no row send nothing.
INLINE int bytes_of_sums(int rows, uint32_t rank) {
    return CLUSTER * own_columns(rank) * (SLICES > 1 ? 4 : (rows + 1) / 2) * OF_THREAD * 4;
}

// A block that is no cluster has nobody to send to, and stores.
template <typename Values>
INLINE void send_or_store(uint32_t to, uint32_t barrier, uint32_t block, Values values) {
    if constexpr (CLUSTER > 1)
        send_to_block(to, barrier, block, values);
    else
        store_shared(to, values);
}

// Brings a thread's sums to where `SUMS_BYTES` begin at `sums`, in the block that stores them, whose barrier is `barrier`.
// All blocks of the cluster have begun.
INLINE void send_sums(uint32_t sums, uint32_t barrier, const float (&acc)[SLICES][4], int rows, int rank, int warp) {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const int block = warp / OWN_WARPS, column = (rank * OWN_WARPS + warp % OWN_WARPS) * 16 + group;
    if (SLICES == 1 && 2 * quarter >= rows) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t to = sums + ((column + 8 * half) * 4 + quarter) * OF_THREAD * 4;
        if constexpr (SLICES == 1) {
            send_or_store(to, barrier, block, make_float2(acc[0][2 * half], acc[0][2 * half + 1]));
        } else {
#pragma unroll
            for (int s = 0; s < SLICES; s += 2)
                send_or_store(to + 8 * s, barrier, block,
                              make_float4(acc[s][2 * half], acc[s][2 * half + 1], acc[s + 1][2 * half], acc[s + 1][2 * half + 1]));
        }
    }
}

// Waits for all sums of the block, adds them, and calls `finish(row, column, sums)` for pairs of columns of the tile, in the
// first `COUNT` threads.
template <int COUNT, typename Finish>
INLINE void add_sums(const char* sums, uint32_t barrier, int rows, uint32_t rank, Finish finish) {
    if constexpr (CLUSTER > 1)
        barrier_wait(barrier, 0);
    else
        sync_first<COUNT>();
    const int first_column = 16 * OWN_WARPS * rank;
    for (int i = threadIdx.x; i < own_columns(rank) * 4; i += COUNT) {
        float total[OF_THREAD] = {};
#pragma unroll
        for (int sender = 0; sender < CLUSTER; sender++) {
            const float* const from = reinterpret_cast<const float*>(sums) + (sender * OWN_WARPS * 64 + i) * OF_THREAD;
#pragma unroll
            for (int j = 0; j < OF_THREAD; j++) total[j] = sender == 0 ? from[j] : total[j] + from[j];
        }
        // Of two neighbouring columns one thread takes the even rows, one the odd ones.
        const int column = i / 4, odd = column % 2;
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            const float kept = odd ? total[2 * s + 1] : total[2 * s];
            const float other = __shfl_xor_sync(~0u, odd ? total[2 * s] : total[2 * s + 1], 4);
            const int row = 8 * s + 2 * (i % 4) + odd;
            if (row < rows)
                finish(row, first_column + column - odd, odd ? make_float2(other, kept) : make_float2(kept, other));
        }
    }
}

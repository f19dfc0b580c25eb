// What kernels of few rows share: bytes of a weight in registers, and the sums of warps and of blocks, added in a fixed
// order.
//
// Macros: ROWS (a multiple of 8), TILES, WARPS_N, WARPS_K and CLUSTER, as `gemv_a16w8.cu` explains them.
#pragma once
#include "mma.cuh"

constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 16 * TILES;  // of a warp
constexpr int BN = COLUMNS * WARPS_N;
constexpr int SLICES = ROWS / 8;
// Sums of a row lie so that threads with neighbouring rows write to other banks.
constexpr int PITCH = BN + 4;

INLINE uint32_t word(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

// The first `count` bytes of a word, and zeros.
INLINE uint32_t first_bytes(uint32_t word, int count) {
    return count >= 4 ? word : count <= 0 ? 0u : word & ((1u << 8 * count) - 1);
}

// The first `count` bytes of a piece, and zeros.
INLINE uint4 first_bytes(const uint4& piece, int count) {
    return make_uint4(first_bytes(piece.x, count), first_bytes(piece.y, count - 4), first_bytes(piece.z, count - 8),
                      first_bytes(piece.w, count - 12));
}

// Puts a warp's sums into `sums (WARPS_K, rows, PITCH)`; `column(tile, half)` is that of a thread in the matrix.
template <typename Column>
INLINE void put_sums(float* sums, const float (&acc)[TILES][SLICES][4], int rows, int warp_k, int quarter, int tile_n,
                     Column column) {
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int row = 8 * s + 2 * quarter + odd;
            float* to = sums + (warp_k * rows + row) * PITCH - tile_n;
            if (row < rows) {
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    to[column(tile, 0)] = acc[tile][s][odd];
                    to[column(tile, 1)] = acc[tile][s][odd + 2];
                }
            }
        }
    }
}

// Adds the sums `(WARPS_K, rows, PITCH)` in `memory`, and those of the cluster's blocks, which arrive `received` bytes
// from there; calls `finish` with each pair of columns, counted along the rows of the tile, and its sums.
template <typename Finish>
INLINE void add_sums(char* memory, int rows, int received, uint32_t rank, Finish finish) {
    float* const sums = reinterpret_cast<float*>(memory);
    auto pair_at = [&](int part, int i) {
        return reinterpret_cast<float2*>(sums + (part * rows + i / (BN / 2)) * PITCH + i % (BN / 2) * 2);
    };
    const int pairs = rows * (BN / 2);
    // Pairs whose sums a block of the cluster adds up: its own, and those that the others send, `share` of each.
    const uint32_t share = (pairs + CLUSTER - 1) / CLUSTER;
    float2* const arrived = reinterpret_cast<float2*>(memory + received);
    if constexpr (CLUSTER > 1) cluster_wait();  // all blocks have begun
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        float2 total = *pair_at(0, i);
#pragma unroll
        for (int part = 1; part < WARPS_K; part++) {
            const float2 sum = *pair_at(part, i);
            total.x += sum.x;
            total.y += sum.y;
        }
        if constexpr (CLUSTER > 1)
            store_to_block(arrived + rank * share + i % share, i / share, total);
        else
            finish(i, total);
    }
    if constexpr (CLUSTER > 1) {
        cluster_sync();
        for (int i = threadIdx.x; i < share && rank * share + i < pairs; i += THREADS) {
            float2 total = arrived[i];
#pragma unroll
            for (int other = 1; other < CLUSTER; other++) {
                const float2 sum = arrived[other * share + i];
                total.x += sum.x;
                total.y += sum.y;
            }
            finish(rank * share + i, total);
        }
    }
}
